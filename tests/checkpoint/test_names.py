"""The table of names against the specification's counts, the released index, and what is to be skipped."""

import gzip
import json
from collections import Counter
from math import prod

import pytest

from k3mlx.checkpoint.names import (
    TensorSpec,
    dense_specs,
    expert_parts,
    skip_reason,
    strip_prefix,
    tensor_specs,
)
from k3mlx.checkpoint.safetensors import ITEMSIZES
from k3mlx.config import ModelConfig, load_config
from k3mlx.errors import ModelFilesError
from tests.paths import DATA, needs_data
from tests.tiny import config_dict


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return load_config(DATA)


@needs_data
def test_table_equals_the_released_index(released: ModelConfig) -> None:
    with gzip.open(DATA / "model.safetensors.index.json.gz") as file:
        stored = {strip_prefix(name) for name in json.load(file)["weight_map"]}
    skipped = Counter(filter(None, (skip_reason(name, 93) for name in stored)))
    assert skipped == {"vision": 168}
    expected = [spec.name for spec in tensor_specs(released, mxfp4=True)]
    assert len(expected) == len(set(expected)) == 497_052
    assert {name for name in stored if skip_reason(name, 93) is None} == set(expected)


@needs_data
def test_bytes_equal_the_ledger(released: ModelConfig) -> None:
    """Model specification §4.5: shapes and released dtypes close on it with no remainder."""

    def size(spec: TensorSpec) -> int:
        return prod(spec.shape) * ITEMSIZES[spec.dtypes[0]]

    dense = sum(size(spec) for spec in dense_specs(released))
    expert = sum(size(spec) for spec in expert_parts(released, mxfp4=True).values())
    assert dense == 113_509_540_864
    assert expert == 17_547_264
    assert dense + 92 * 896 * expert == 1_559_965_606_912
    vision = 894_717_952
    assert dense + 92 * 896 * expert + vision == 1_560_860_324_864


def test_parts_of_an_expert() -> None:
    config = ModelConfig.from_dict(config_dict(moe_intermediate_size=64, routed_expert_hidden_size=96))
    packed = {part: spec.shape for part, spec in expert_parts(config, mxfp4=True).items()}
    assert list(packed.items()) == [
        ("w1.weight_packed", (64, 48)),
        ("w1.weight_scale", (64, 3)),
        ("w2.weight_packed", (96, 32)),
        ("w2.weight_scale", (96, 2)),
        ("w3.weight_packed", (64, 48)),
        ("w3.weight_scale", (64, 3)),
    ]
    plain = {part: spec.shape for part, spec in expert_parts(config, mxfp4=False).items()}
    assert plain == {"w1.weight": (64, 96), "w2.weight": (96, 64), "w3.weight": (64, 96)}


@pytest.mark.parametrize("field", ["moe_intermediate_size", "routed_expert_hidden_size"])
def test_mxfp4_needs_multiples_of_32(field: str) -> None:
    config = ModelConfig.from_dict(config_dict(quantization_config=None, **{field: 48}))
    expert_parts(config, mxfp4=False)
    with pytest.raises(ModelFilesError, match=f"{field} is 48, but MXFP4 experts need a multiple of 32"):
        expert_parts(config, mxfp4=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vision_tower.encoder.blocks.0.wo.weight", "vision"),
        ("mm_projector.proj.0.weight", "vision"),
        ("mtp.fc.weight", "multi-token prediction"),
        ("model.mtp.layers.0.norm.weight", "multi-token prediction"),
        ("model.layers.5.input_layernorm.weight", "layers beyond num_hidden_layers"),
        ("model.layers.99999.mlp.up_proj.weight", "layers beyond num_hidden_layers"),
        ("model.layers.4.input_layernorm.weight", None),
        ("model.layers.05.input_layernorm.weight", None),
        ("model.layers.x.input_layernorm.weight", None),
        ("lm_head.weight", None),
        ("model.vision_tower.weight", None),
    ],
)
def test_skipped_names(name: str, why: str | None) -> None:
    assert skip_reason(name, 5) == why


def test_prefix() -> None:
    assert strip_prefix("language_model.lm_head.weight") == "lm_head.weight"
    assert strip_prefix("lm_head.weight") == "lm_head.weight"
    assert strip_prefix("language_model.language_model.x") == "language_model.x"
