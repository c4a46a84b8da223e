"""Sizes of the released model to the byte, as the specification's tables have them (§4.5, §5)."""

import json

import pytest

from k3mlx.config import ModelConfig
from k3mlx.planning import ledger
from k3mlx.planning.paper import PaperCheckpoint
from k3mlx.planning.released import RELEASED
from k3mlx.planning.source import FORMATS, describe
from tests.paths import DATA, needs_data

LEDGER = {  # bytes a layer, layers, all
    "KDA attention": (887_800_832, 69, 61_258_257_408),
    "MLA attention": (464_392_192, 24, 11_145_412_608),
    "shared experts": (264_241_152, 92, 24_310_185_984),
    "latent projections and norm": (102_767_616, 92, 9_454_620_672),
    "router": (12_848_640, 92, 1_182_074_880),
    "dense MLP": (1_453_326_336, 1, 1_453_326_336),
    "layer norms and residual mixing": (86_016, 93, 7_999_488),
    "embedding": (2_348_810_240, 1, 2_348_810_240),
    "head": (2_348_810_240, 1, 2_348_810_240),
    "final norm and output mixing": (43_008, 1, 43_008),
    "routed experts": (15_722_348_544, 92, 1_446_456_066_048),
}


def test_the_byte_ledger() -> None:
    rows = ledger.stored(RELEASED)
    assert {row.group: tuple(row[1:]) for row in rows} == LEDGER
    assert rows[-1].group == ledger.EXPERTS
    assert sum(row.total for row in rows) == 1_559_965_606_912
    assert sum(row.total for row in rows[:-1]) == 113_509_540_864
    assert ledger.expert_bytes(RELEASED) == 17_547_264
    assert ledger.token_bytes(RELEASED) == 25_829_572_608


@pytest.mark.parametrize(
    ("context", "latents", "total"),
    [
        (8192, 226_492_416, 675_864_576),
        (131_072, 3_623_878_656, 4_073_250_816),
        (1_048_576, 28_991_029_248, 29_440_401_408),
    ],
)
def test_the_cache_table(context: int, latents: int, total: int) -> None:
    assert ledger.session(RELEASED, context) == {
        "kda_state": 434_110_464,
        "kda_windows": 15_261_696,
        "mla_latents": latents,
        "mla_latents_per_token": 27_648,
        "total": total,
    }


@needs_data
def test_the_numbers_of_the_release_are_those_of_its_config() -> None:
    assert ModelConfig.from_dict(json.loads((DATA / "config.json").read_bytes())) == RELEASED


def test_resident_bytes_of_each_format() -> None:
    """In bf16 as stored; 8 or 4 bits and two bf16 numbers for 64 weights where a part has a format."""
    formats = describe(None).formats
    assert list(formats) == list(FORMATS)
    bf16, int8, int4 = (ledger.resident(formats[name]) for name in FORMATS)
    assert sum(bf16.values()) == 113_509_540_864
    assert bf16["kept"] == int8["kept"] == int4["kept"]
    for part in bf16.keys() - {"kept"}:
        assert int8[part] * 16 == bf16[part] * 8.5
        assert int4[part] * 16 == bf16[part] * 4.5


def test_totals_of_the_release_and_of_an_index() -> None:
    assert describe(None).vision == 894_717_952
    assert sum(row.total for row in ledger.stored(RELEASED)) + 894_717_952 == 1_560_860_324_864


def test_a_paper_expert_lies_in_one_piece() -> None:
    (span,) = PaperCheckpoint(RELEASED).expert_spans(5, 895)
    assert span.nbytes == 17_547_264
