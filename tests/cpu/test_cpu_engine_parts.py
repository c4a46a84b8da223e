"""Experts from a store by the C kernels, against numpy in float64."""

import threading

import numpy as np
import pytest

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.errors import ModelFilesError
from k3mlx.experts import filling
from k3mlx.experts.compute import NumpyExperts
from k3mlx.experts.native import NativeExperts
from k3mlx.experts.store import ExpertStore
from k3mlx.kernels.cpu_queue import Kind, Queue
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
    store = ExpertStore(checkpoint, None)
    bad = int(ids[0, 0])
    list(store.fetch(layer, range(checkpoint.config.num_experts)))
    for held in store.fetch(layer, [bad]):
        held.parts["w3.weight_scale"][0, 0] = 255
    with pytest.raises(ModelFilesError, match=rf"layer {layer}, .*\b{bad} \(.*safetensors.*255"):
        NativeExperts(store, checkpoint.config, kernels).start(layer, x, ids, weights)(latent)
    store.close()


def test_a_latent_to_come_gives_the_same_bits(checkpoint, kernels, rng):
    layer, x, ids, weights, latent = routed(checkpoint, rng, 1)
    store, queue = ExpertStore(checkpoint, None), Queue(kernels)
    experts, nothing = NativeExperts(store, checkpoint.config, kernels), np.zeros_like(latent)
    results = [
        experts.start(layer, x, ids, weights)(given)
        for given in (queue.pairs(Kind.SUM, latent, nothing), latent, queue.pairs(Kind.SUM, latent, nothing))
    ]  # while they are read, then from the cache
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[2], results[1])
    bad = int(ids[0, 0])
    for held in store.fetch(layer, [bad]):
        held.parts["w3.weight_scale"][0, 0] = 255
    with pytest.raises(ModelFilesError, match=f"layer {layer}.*255"):
        experts.start(layer, x, ids, weights)(queue.pairs(Kind.SUM, latent, nothing))
    store.close()


def test_what_a_latent_waits_for_is_computed_beside_the_reads(checkpoint, kernels, rng, monkeypatch):
    layer, x, ids, weights, latent = routed(checkpoint, rng, 1)
    store, queue = ExpertStore(checkpoint, None), Queue(kernels)
    computed, found, read, run = threading.Event(), [], filling._read_pieces, Queue.run

    def late(*arguments):
        found.append(computed.wait(5))
        return read(*arguments)

    monkeypatch.setattr(filling, "_read_pieces", late)
    monkeypatch.setattr(Queue, "run", lambda own: (run(own), computed.set()))
    experts = NativeExperts(store, checkpoint.config, kernels)
    experts.start(layer, x, ids, weights)(queue.pairs(Kind.SUM, latent, latent))
    store.close()
    assert found
    assert all(found)
