"""Several machines on paper: parts add up to the whole, messages are as specified, and more hardware is never worse."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.checkpoint.names import dense_specs
from k3mlx.convert.formats import PARTS, Formats
from k3mlx.errors import UsageError
from k3mlx.needs import backend_needs, experts_only
from k3mlx.planning.machines import MACS
from k3mlx.planning.paper import PaperCheckpoint
from k3mlx.planning.plan import METAL
from k3mlx.planning.ranks import Link, busiest, look_at_ranks, traffic
from k3mlx.planning.released import RELEASED
from k3mlx.planning.source import describe
from k3mlx.ranks.part import HEAD, Part, divide
from tests import tiny
from tests.planning.test_plan import values

LINK = Link(2.5e9, 100e-6)


@pytest.mark.parametrize(
    ("count", "size", "unit"), [(96, 2, 1), (7, 3, 1), (2, 4, 1), (100, 3, 32), (11, 2, 64)]
)
def test_parts_of_a_count_are_all_of_it_in_whole_units(count: int, size: int, unit: int) -> None:
    parts = [divide(count, rank, size, unit) for rank in range(size)]
    assert [n for part in parts for n in part] == list(range(count))
    assert all(part.start % unit == 0 or not part for part in parts)
    units = [-(-len(part) // unit) for part in parts]
    assert max(units) - min(units) <= 1
    assert units[0] == max(units)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_divided_is_on_one_rank_and_what_all_heads_share_on_each(tmp_path: Path, size: int) -> None:
    rng = np.random.default_rng(size)
    folder = tiny.write_random_model(tmp_path, tiny.random_config(rng, num_attention_heads=3), rng)
    with open_checkpoint(folder) as checkpoint:
        config = checkpoint.config
        parts = [Part(config, rank, size, checkpoint.quantized) for rank in range(size)]
    for spec in dense_specs(config):
        cuts = [part.cut(spec.name) for part in parts]
        having = [part.rank for part in parts if part.has(spec.name)]
        if cuts[0] is not None:
            found = [n for cut in cuts if cut for n in range(cut.start, cut.stop)]
            assert found == list(range((spec.short or spec.shape)[cuts[0].axis])), spec.name
            assert having == [
                part.rank for part, cut in zip(parts, cuts, strict=True) if cut and cut.stop > cut.start
            ]
        elif ".self_attn." in spec.name:
            kind = config.layer_kinds[int(spec.name.split(".")[2])]
            assert having == [part.rank for part in parts if part.heads[kind]], spec.name
        else:
            assert having == [0], spec.name
    assert parts[0].cut(HEAD) is not None


def test_a_part_of_one_is_the_whole() -> None:
    paper = PaperCheckpoint(RELEASED)
    part = Part(RELEASED, 0, 1, paper.quantized)
    assert values(backend_needs(METAL, paper, None, part=part)) == values(backend_needs(METAL, paper, None))


def test_bytes_of_the_parts_add_up_but_for_what_is_shared() -> None:
    for formats in (None, Formats(dict.fromkeys(PARTS, 4))):
        paper = PaperCheckpoint(RELEASED, formats)
        whole = backend_needs(METAL, paper, None)
        halves = [
            backend_needs(METAL, paper, None, part=Part(RELEASED, n, 2, paper.quantized)) for n in (0, 1)
        ]
        both = sum(needs.dense.total for needs in halves)
        assert whole.dense.total < both < 1.01 * whole.dense.total
        latents = 3 * 24 * 8192 * (512 + 64) * 4  # copies, MLA layers, tokens, float32: on every rank
        assert sum(needs.state for needs in halves) == whole.state + latents
        read = [sum(needs.dense.stored) for needs in halves]
        assert max(read) < sum(whole.dense.stored) < sum(read)


def test_heads_that_are_no_whole_groups_are_refused() -> None:
    config = replace(RELEASED, v_head_dim=96)
    paper = PaperCheckpoint(config, Formats(dict.fromkeys(PARTS, 4)))
    with pytest.raises(
        UsageError, match=r"o_proj.*groups of 64 columns and a head has 96, expected a multiple"
    ):
        Part(config, 0, 2, paper.quantized)
    Part(config, 0, 1, paper.quantized)


def test_messages_of_the_release() -> None:
    spread, split = (traffic(RELEASED, 2, dense) for dense in (False, True))
    assert (spread.layer_messages, 4 * spread.layer_floats) == (2, 4 * (2 * 3584 + 2 * 16))
    assert (spread.messages, spread.bytes_in(1)) == (2 * 92, 92 * 28_800)
    assert (split.layer_messages, 4 * split.layer_floats) == (4, 28_800 + 4 * 4 * 7168)
    assert split.messages == 4 * 93 + 2
    assert split.bytes_in(1) == 92 * 28_800 + 93 * 4 * 4 * 7168 + 4 * (7168 + 163_840 // 2)
    assert split.bytes_in(5) - split.bytes_in(4) == 4 * split.per_token
    assert spread.seconds(1, 3, LINK) == pytest.approx(2 * (184 * 100e-6 + 92 * 28_800 / 2.5e9))


@pytest.mark.parametrize(("chosen", "size"), [(1, 4), (4, 3), (6, 2)])
def test_the_busiest_rank_by_enumeration(chosen: int, size: int) -> None:
    draws = list(product(range(size), repeat=chosen))
    expected = sum(max(Counter(draw).values()) for draw in draws) / len(draws) / chosen
    assert busiest(chosen, size) == pytest.approx(expected)


def test_more_machines_and_faster_links_are_not_slower() -> None:
    source, macs = describe(None), (MACS[2], MACS[6])
    by_size = {size: look_at_ranks(source, size, 8192, LINK, macs) for size in (2, 4)}
    slow = look_at_ranks(source, 2, 8192, Link(1e8, 1e-3), macs)
    for two, four, late in zip(by_size[2].cases, by_size[4].cases, slow.cases, strict=True):
        assert two.machine == four.machine == late.machine
        assert four.tokens_per_second.high > two.tokens_per_second.high > late.tokens_per_second.high
        assert four.bytes_per_token.high < two.bytes_per_token.high
        assert late.link_seconds > two.link_seconds
    assert by_size[4].owned_bytes_per_token == 16 * 92 * 17_547_264 // 4


def test_rank_0_has_the_dense_weights_or_its_part_of_them() -> None:
    source = describe(None)
    found = look_at_ranks(source, 2, 8192, LINK, (MACS[-1],))
    spread, split = found.cases
    assert spread.ranks is not None
    assert split.ranks is not None
    whole = backend_needs(METAL, source.formats[spread.format], None)
    assert [rank.dense for rank in spread.ranks] == [whole.dense.total, experts_only(whole).dense.total]
    assert split.ranks[0].dense + split.ranks[1].dense == pytest.approx(whole.dense.total, rel=0.01)
    for case in found.cases:
        assert all(rank.plan.memory == case.budget for rank in case.ranks or ())
