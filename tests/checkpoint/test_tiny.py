"""The models the other tests use: the specification's checks of its five-layer model, and random ones open."""

from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.config import ModelConfig
from tests import tiny


def test_hash_of_the_specification() -> None:
    assert [f"{t:08X}" for t in tiny.spec_hash(1, 4)] == ["9BB31115", "8CD22B09", "21FA7246", "01E95D13"]


def test_values_of_the_specification() -> None:
    tensors = tiny.spec_tensors()
    names = list(tensors)
    assert len(names) == 272
    assert names[0] == "lm_head.weight"
    head = tensors["lm_head.weight"]
    assert head.dtype == np.float32
    np.testing.assert_allclose(head.ravel()[:3], [0.0662593693, 0.0306687821, -0.224907398], rtol=1e-8)
    packed = "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"
    scale = "model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"
    assert (names.index(packed) + 1, names.index(scale) + 1) == (26, 27)
    assert tensors[packed].ravel()[:4].tolist() == [183, 38, 134, 5]
    assert tensors[scale].ravel()[:4].tolist() == [125, 123, 122, 125]
    decay = tensors["model.layers.0.self_attn.A_log"]
    assert decay.shape == (128,)
    assert np.count_nonzero(decay) == 2


def test_spec_model_on_disk(tmp_path: Path) -> None:
    with Checkpoint.open(tiny.write_spec_model(tmp_path)) as checkpoint:
        assert checkpoint.mxfp4
        for name, values in tiny.spec_tensors().items():
            np.testing.assert_array_equal(checkpoint.raw(name), values, strict=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("experts", ["mxfp4", "plain"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_random_models_are_complete(tmp_path: Path, seed: int, experts: str, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    config = tiny.random_config(rng, experts)
    with Checkpoint.open(
        tiny.write_random_model(tmp_path, config, rng, dtype=dtype, shards=1 + seed)
    ) as checkpoint:
        assert checkpoint.mxfp4 == (experts == "mxfp4")
        assert {"kda", "mla"} == set(checkpoint.config.layer_kinds)
        assert checkpoint.config.kda_num_heads != checkpoint.config.num_attention_heads
        assert checkpoint.tensors["model.layers.0.input_layernorm.weight"].dtype == dtype
        for name, info in checkpoint.tensors.items():
            if info.dtype != "U8":
                values = checkpoint.load(name)
                assert np.isfinite(values).all()
                assert values.std() > 0.01 or values.size == 1


def test_overrides_reach_the_config() -> None:
    rng = np.random.default_rng(0)
    config = ModelConfig.from_dict(
        tiny.random_config(
            rng, "plain", hidden_size=77, num_experts=3, linear_attn_config={"head_dim": 96, "num_heads": 7}
        )
    )
    assert (config.hidden_size, config.num_experts, config.kda_head_dim, config.kda_num_heads) == (
        77,
        3,
        96,
        7,
    )
    assert config.num_experts_per_token <= 3
    assert not config.experts_are_mxfp4
