"""Experts by the C kernels on both backends: the numpy result to rounding, and the same bits whatever the cache and
threads."""

import numpy as np
import pytest

import k3mlx
from k3mlx.errors import ResourceError, UsageError
from k3mlx.experts import native
from k3mlx.kernels.cpu import load_cpu_kernels
from tests.tiny import random_config, write_random_model

try:
    load_cpu_kernels()
except ResourceError as error:
    pytest.skip(f"{error}", allow_module_level=True)

IDS = np.random.default_rng(4).integers(0, 37, 90).tolist()


def logits(folder, backend="numpy", **options):
    """Rows after a prompt and two decoded tokens, and what the report calls the experts' kernel."""
    with k3mlx.load(folder, backend=backend, device="cpu", warm_start="off", **options) as engine:
        session = engine.session()
        rows = np.concatenate([session.feed(IDS, all_logits=True), [session.feed([3]), session.feed([5])]])
        parts = {part["part"]: part["kernel"] for part in engine.report()["parts"]}
        return rows, parts["experts"]


@pytest.fixture(scope="module", params=["mxfp4", "plain", "bf16"])
def model(request, tmp_path_factory):
    rng = np.random.default_rng(17)
    experts = "mxfp4" if request.param == "mxfp4" else "plain"
    config = random_config(rng, experts=experts, num_experts=9, num_experts_per_token=3)
    dtype = "BF16" if request.param == "bf16" else "F32"
    return write_random_model(tmp_path_factory.mktemp("model"), config, rng, experts=experts, dtype=dtype)


def test_agrees_with_numpy_and_says_what_it_is(model):
    by_numpy, name = logits(model, experts_kernel="numpy")
    assert name == "numpy"
    by_kernel, name = logits(model, experts_kernel="native")
    assert name.startswith("C kernels, ")
    np.testing.assert_allclose(by_kernel, by_numpy, atol=2e-5 * np.abs(by_numpy).max())
    assert logits(model)[1] == name  # auto takes them


def test_same_bits_for_any_cache_policy_threads_and_order(model, monkeypatch):
    expected, _ = logits(model, experts_kernel="native", cpu_threads=1)
    for options in (
        {"expert_cache": 0},
        {"expert_cache": 20_000, "cache_policy": "lru"},
        {"cpu_threads": 3},
        {"pipe": "off", "io_threads": 1},
    ):
        np.testing.assert_array_equal(
            logits(model, experts_kernel="native", **options)[0], expected, str(options)
        )
    monkeypatch.setattr(
        "k3mlx.experts.compute.SUMMANDS_MAX", 0
    )  # experts in the order of ids, added as they come
    np.testing.assert_array_equal(logits(model, experts_kernel="native", expert_cache=0)[0], expected)


def test_an_expert_is_described_to_the_kernels_once_while_it_is_in_memory(model, monkeypatch):
    described = []
    original = native._records
    monkeypatch.setattr(native, "_records", lambda held: (described.append(held), original(held))[1])
    with k3mlx.load(model, backend="numpy", experts_kernel="native", warm_start="off") as engine:
        session = engine.session()
        for _ in range(3):
            session.feed(IDS)
        misses = engine.report()["experts"]["misses"]
    assert len(described) == misses > 0
    assert len(set(map(id, described))) == misses


def test_mlx_takes_them_too(model):
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    by_streams, name = logits(model, "mlx", experts_kernel="stream")
    assert name.startswith("mlx on ")
    by_kernel, name = logits(model, "mlx")
    assert name.startswith("C kernels, ")
    assert np.abs(by_kernel - by_streams).max() > 0  # other sums
    np.testing.assert_allclose(by_kernel, by_streams, atol=2e-5 * np.abs(by_streams).max())
    with pytest.raises(UsageError, match="experts_kernel is 'numpy'"):
        k3mlx.load(model, backend="mlx", device="cpu", experts_kernel="numpy")


def test_mlx_falls_back_to_its_streams_aloud(model, monkeypatch):
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    failed = native.verify(load_cpu_kernels())[0]._replace(ok=False, worst=0.5)
    monkeypatch.setattr(native, "verify", lambda kernels: [failed])
    with k3mlx.load(model, backend="mlx", device="cpu") as engine:
        assert any("CPU streams of mlx" in line and "compute wrong" in line for line in engine.backend.notes)
        assert engine.backend.room.experts is not None
    with pytest.raises(ResourceError, match="compute wrong on this machine"):
        k3mlx.load(model, backend="mlx", device="cpu", experts_kernel="native")


def test_wrong_results_on_this_machine_switch_it_off_aloud(model, monkeypatch):
    failed = native.verify(load_cpu_kernels())[0]._replace(ok=False, worst=0.5)
    monkeypatch.setattr(native, "verify", lambda kernels: [failed])
    with k3mlx.load(model, backend="numpy") as engine:
        assert any("compute wrong on this machine: mxfp4 by 5.0e-01" in line for line in engine.backend.notes)
        assert engine.backend.model.experts.kernel == "numpy"
    with pytest.raises(ResourceError, match="compute wrong on this machine"):
        k3mlx.load(model, backend="numpy", experts_kernel="native")


def test_float64_is_computed_by_numpy(model):
    assert logits(model, dtype="float64")[1] == "numpy"
    with pytest.raises(UsageError, match="native computes in float32"):
        k3mlx.load(model, dtype="float64", experts_kernel="native")
    with pytest.raises(UsageError, match="experts_kernel is 'gpu'"):
        k3mlx.load(model, backend="numpy", experts_kernel="gpu")
