"""Experts from a store and weights in place of arrays: what an engine hangs into the forward pass."""

import numpy as np
import pytest

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.errors import ModelFilesError, UsageError
from k3mlx.experts.compute import NumpyExperts
from k3mlx.experts.native import NativeExperts
from k3mlx.experts.store import ExpertStore
from k3mlx.kernels.cpu_linear import Linear
from k3mlx.kernels.cpu_matrix import Matrix
from k3mlx.reference.model import ReferenceModel
from k3mlx.reference.moe import route_topk
from tests.tiny import random_config, write_random_model


@pytest.fixture
def checkpoint(tmp_path):
    rng = np.random.default_rng(3)
    config = random_config(rng, num_hidden_layers=4)
    with Checkpoint.open(write_random_model(tmp_path / "model", config, rng)) as opened:
        yield opened


def routed(checkpoint: Checkpoint, rng: np.random.Generator, tokens: int):
    config = checkpoint.config
    layer = next(n for n in range(config.num_hidden_layers) if config.is_moe(n))
    x = rng.standard_normal((tokens, config.hidden_size)).astype(np.float32)
    gate = rng.standard_normal((config.num_experts, config.hidden_size)).astype(np.float32)
    bias = np.zeros(config.num_experts, np.float32)
    ids, weights = route_topk(x, gate, bias, config.num_experts_per_token, 1.0)
    latent = rng.standard_normal((tokens, config.routed_expert_hidden_size)).astype(np.float32)
    return layer, x, ids, weights, latent


@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_experts_from_a_store_are_those_of_numpy(checkpoint, kernels, rng, tokens):
    layer, x, ids, weights, latent = routed(checkpoint, rng, tokens)
    results = []
    for make in (
        lambda store: NumpyExperts(store, checkpoint.config, np.float64),
        lambda store: NativeExperts(store, checkpoint.config, kernels),
    ):
        store = ExpertStore(checkpoint, None)
        experts = make(store)
        for _ in range(2):  # read, then from the cache
            results.append(experts.start(layer, x, ids, weights)(latent.astype(experts._dtype)))
        store.close()
    exact, _, native, again = results
    assert native.dtype == np.float32
    assert np.array_equal(native, again)
    assert np.abs(native - exact).max() <= 2e-6 * np.abs(exact).max()


def test_a_damaged_expert_is_named_with_its_file(checkpoint, kernels, rng, monkeypatch):
    layer, x, ids, weights, latent = routed(checkpoint, rng, 5)
    if not checkpoint.mxfp4:
        pytest.skip("this random model has no scale bytes")
    store = ExpertStore(checkpoint, None)
    bad = int(ids[0, 0])
    list(store.fetch(layer, range(checkpoint.config.num_experts)))
    for held in store.fetch(layer, [bad]):
        held.parts["w3.weight_scale"][0, 0] = 255
    with pytest.raises(ModelFilesError, match=rf"layer {layer}, .*\b{bad} \(.*safetensors.*255"):
        NativeExperts(store, checkpoint.config, kernels).start(layer, x, ids, weights)(latent)
    store.close()


def test_a_forward_pass_on_stored_weights(checkpoint, kernels):
    """Every product of the layers through `Linear`, experts in C: the reference's logits."""
    store, exact_store = ExpertStore(checkpoint, None), ExpertStore(checkpoint, None)
    config = checkpoint.config
    exact = ReferenceModel(checkpoint, NumpyExperts(exact_store, config, np.float64), np.dtype(np.float64))
    native = ReferenceModel(checkpoint, NativeExperts(store, config, kernels), np.dtype(np.float32))
    kept = {"kv_b_proj"}  # MLA takes this one apart by heads
    for weights in native.layers:
        for part in (weights.attention, weights.ffn):
            for name, array in part.items():
                if array.ndim == 2 and name.endswith("proj") and name not in kept:
                    part[name] = Linear(kernels, Matrix.dense(array))
    ids = [5, 3, 8, 1, 13, 2, 7]
    expected, _ = exact.forward(ids, exact.new_state(), all_logits=True)
    got, state = native.forward(ids[:4], native.new_state(), all_logits=True)
    more, _ = native.forward(ids[4:], state, all_logits=True)
    both = np.concatenate([got, more])
    assert both.dtype == np.float32
    assert np.abs(both - expected).max() <= 1e-4 * np.abs(expected).max()
    store.close()
    exact_store.close()


def test_linear_refuses_what_it_cannot(kernels):
    weight = Linear(kernels, Matrix.dense(np.ones((3, 5), np.float32)))
    assert weight.shape == (3, 5)
    assert weight.T.shape == (5, 3)
    assert weight.nbytes == 60
    np.testing.assert_array_equal(np.ones((2, 5), np.float32) @ weight.T, np.full((2, 3), 5.0))
    with pytest.raises(UsageError, match="expected float32"):
        np.ones((2, 5)) @ weight.T
