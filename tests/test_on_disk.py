"""Weights that stay on disk: the same numbers as in memory, in every form of storage, and a pass that uses them."""

import numpy as np
import pytest

from k3mlx import on_disk
from k3mlx.backend import make_backend
from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.devices import choose
from k3mlx.errors import ResourceError
from k3mlx.experts.native import verified_kernels
from k3mlx.reference.model import Hooks
from k3mlx.reference.weights import load_outer
from tests.tiny import random_config, write_random_model


@pytest.fixture(params=["F32", "BF16"])
def checkpoint(request, tmp_path):
    rng = np.random.default_rng(3)
    write_random_model(tmp_path, random_config(rng, num_hidden_layers=4), rng, dtype=request.param)
    with open_checkpoint(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("piece", [1, 1000, 1 << 22])
def test_matrix(checkpoint, monkeypatch, piece):
    monkeypatch.setattr(on_disk, "PIECE", piece)
    name = "lm_head.weight"
    matrix, whole = on_disk.DiskMatrix(checkpoint, name, np.float64), checkpoint.load(name, np.float64)
    x = np.random.default_rng(1).standard_normal((3, whole.shape[1]))
    np.testing.assert_allclose(x @ matrix.T, x @ whole.T, rtol=1e-12)
    assert np.array_equal(matrix[np.array([5, 0, 5])], whole[[5, 0, 5]])


def test_products_by_the_c_kernels_with_rows_as_they_are_stored(checkpoint, monkeypatch):
    kernels = cpu_kernels()
    monkeypatch.setattr(on_disk, "PIECE", 1000)
    whole = checkpoint.load("lm_head.weight", np.float64)
    outer = load_outer(on_disk.DiskTensors(checkpoint, kernels), np.dtype(np.float32))
    x = np.random.default_rng(1).standard_normal((3, whole.shape[1])).astype(np.float32)
    calls = []
    matmul = type(kernels).matmul
    monkeypatch.setattr(type(kernels), "matmul", lambda *a: calls.append(a[2].shape) or matmul(*a))
    np.testing.assert_allclose(x @ outer["lm_head"].T, x @ whole.T, rtol=0, atol=1e-5)
    assert sum(rows for rows, _ in calls) == whole.shape[0]
    assert len(calls) > 1


def cpu_kernels():
    try:
        return verified_kernels(1)
    except ResourceError as error:
        pytest.skip(f"no CPU kernels: {error}")


def test_only_what_is_multiplied_with_stays_on_disk(checkpoint):
    layers = on_disk.DiskLayers(checkpoint, np.float64)
    for number, kind in enumerate(checkpoint.config.layer_kinds):
        weights = layers[number]
        kept = "kv_b_proj" if kind == "mla" else "taps"
        assert isinstance(weights.attention[kept], np.ndarray)
        assert isinstance(weights.attention["o_proj"], on_disk.DiskMatrix)
        assert weights.norms["mlp_res_proj"].shape == (checkpoint.config.hidden_size,)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("numpy", "float32"), ("numpy", "float64"), ("mlx", "float32"), ("mlx", "bfloat16")],
)
def test_a_thin_backend_computes_the_same(checkpoint, backend, dtype):
    ids, logits = list(range(20)), []
    for thin in (False, True):
        made = make_backend(choose(backend, "cpu"), checkpoint, dtype, None, thin=thin)
        logits.append(made.forward(ids, made.new_state(), True, Hooks())[0])
        made.close()
    assert np.abs(logits[0] - logits[1]).max() <= 1e-5  # a product in pieces may round otherwise
    assert np.abs(logits[0]).max() > 0.1
