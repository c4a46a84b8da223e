"""The parts of a layer that the CPU kernels compute, against the reference in float64."""

import numpy as np
import pytest

from k3mlx.errors import UsageError
from k3mlx.kernels.cpu import load_cpu_kernels
from k3mlx.kernels.cpu_linear import Linear
from k3mlx.kernels.cpu_parts import CpuParts
from k3mlx.reference import kda, mla
from k3mlx.reference.attn_res import attn_res_mix
from k3mlx.reference.ops import situ_mlp

from .test_cpu_matmul import make

NAMES = ("y", "windows", "state")


def kda_case(rng: np.random.Generator, tokens: int, heads: int, width: int, taps: int = 4) -> tuple:
    """Arguments of `kda_step`; the gates go from forgetting at once to keeping everything."""
    P = heads * width
    streams = [rng.standard_normal((tokens, P)) for _ in range(4)]
    b, gate = rng.standard_normal((tokens, heads)), rng.standard_normal((tokens, P))
    windows, state = rng.standard_normal((3, taps - 1, P)), rng.standard_normal((heads, width, width))
    weights = rng.standard_normal((3, P, taps)), rng.standard_normal(heads), 4 * rng.standard_normal(P)
    arrays = (*streams, b, gate, windows, state, *weights, 1 + 0.1 * rng.standard_normal(width))
    return *(array.astype(np.float32) for array in arrays), -5.0, 1e-5, 1e-6


def in_float64(case: tuple) -> tuple:
    return tuple(part.astype(np.float64) if isinstance(part, np.ndarray) else part for part in case)


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "taps"),
    [(1, 3, 128, 4), (1, 2, 16, 4), (2, 5, 48, 4), (3, 2, 256, 2), (7, 4, 112, 8), (40, 2, 128, 4)],
)
def test_kda_step_is_the_references(kernels, rng, tokens, heads, width, taps):
    case = kda_case(rng, tokens, heads, width, taps)
    before = [np.copy(part) for part in case]
    got = CpuParts(kernels).kda_step(*case)
    for name, part, exact in zip(NAMES, got, kda.kda_step(*in_float64(case)), strict=True):
        error = np.abs(part - exact).max() / np.abs(exact).max()
        assert part.dtype == np.float32
        assert error <= 3e-6, f"{name}: {error:.2g} of the largest, allowed 3e-6"
    for part, copy in zip(case, before, strict=True):
        np.testing.assert_array_equal(part, copy, "an argument was overwritten")


def test_kda_bits_do_not_depend_on_threads_nor_on_pieces(isa, rng):
    case = kda_case(rng, 9, 6, 64)
    whole = CpuParts(load_cpu_kernels(isa, threads=1)).kda_step(*case)
    for threads, size in ((2, 9), (3, 4), (8, 1)):
        attention = CpuParts(load_cpu_kernels(isa, threads))
        rows, windows, state = [], case[6], case[7]
        for start in range(0, 9, size):
            fresh = [part[start : start + size] for part in case[:6]]
            y, windows, state = attention.kda_step(*fresh, windows, state, *case[8:])
            rows.append(y)
        for part, exact in zip((np.concatenate(rows), windows, state), whole, strict=True):
            assert np.array_equal(part, exact), f"{threads} threads, {size} tokens a call"


def test_kda_step_leaves_watched_passes_and_odd_widths_to_the_reference(kernels, rng):
    seen = []
    attention = CpuParts(kernels)
    attention.kda_step(*kda_case(rng, 2, 2, 32), lambda stage, array: seen.append(stage) or array)
    assert "q_unit" in seen
    odd = kda_case(rng, 2, 2, 24)
    for part, exact in zip(attention.kda_step(*odd), kda.kda_step(*odd), strict=True):
        assert np.array_equal(part, exact)


@pytest.mark.parametrize("tokens", [1, 5, 30])
@pytest.mark.parametrize(("n", "r"), [(128, 512), (24, 48), (16, 160)])
def test_maps_of_the_heads(kernels, rng, tokens, n, r):
    attention, heads = CpuParts(kernels), 5
    stored = rng.standard_normal((heads, 2 * n, r)).astype(np.float32)  # key maps, then value maps
    key_maps, value_maps = stored[:, :n], stored[:, n:]
    q = rng.standard_normal((tokens, heads, n + 8)).astype(np.float32)[..., :n]
    mixed = rng.standard_normal((heads, tokens, r)).astype(np.float32).transpose(1, 0, 2)
    for x, maps in ((q, key_maps), (mixed, value_maps.transpose(0, 2, 1))):
        got = attention.per_head(x, maps)
        exact = mla.per_head(x.astype(np.float64), maps.astype(np.float64))
        scale = mla.per_head(np.abs(x.astype(np.float64)), np.abs(maps.astype(np.float64)))
        assert got.shape == exact.shape == (tokens, heads, maps.shape[2])
        assert (np.abs(got - exact) / scale).max() <= 1e-6


def test_maps_that_c_cannot_read_are_numpys(kernels, rng):
    x = rng.standard_normal((1, 2, 12)).astype(np.float32)
    maps = rng.standard_normal((2, 12, 12)).astype(np.float32)  # 12 is no multiple of a vector
    assert np.array_equal(CpuParts(kernels).per_head(x, maps), mla.per_head(x, maps))


@pytest.mark.parametrize(("tokens", "sources", "width"), [(1, 2, 7168), (3, 9, 96), (2, 64, 16), (1, 3, 20)])
def test_depth_mix_is_the_references(kernels, rng, tokens, sources, width):
    blocks = [rng.standard_normal((tokens, width)).astype(np.float32) for _ in range(sources - 1)]
    partial = 1e3 * rng.standard_normal((tokens, width)).astype(np.float32)
    norm, query = (rng.standard_normal(width).astype(np.float32) for _ in range(2))
    got = CpuParts(kernels).attn_res_mix(blocks, partial, norm, query, 1e-5)
    wide = [array.astype(np.float64) for array in (*blocks, partial, norm, query)]
    exact = attn_res_mix(wide[: sources - 1], *wide[sources - 1 :], 1e-5)
    assert got.dtype == np.float32
    assert np.abs(got - exact).max() <= 2e-5 * np.abs(exact).max()
    assert CpuParts(kernels).attn_res_mix([], partial, norm, query, 1e-5) is partial


def test_products_of_one_input_are_those_of_single_calls(isa, rng):
    """Formats of both orders of packing and integers in one call; more matrices than a call takes."""
    kinds = ["int4-64-b", "bf16", "mxfp4", "int8-32-f", "float32", "int4-128-h", "bf16", "mxfp4", "int4-32-f"]
    weights = [make(rng, kind, 20 + 31 * i, 640)[0] for i, kind in enumerate(kinds)]
    for threads in (1, 3):
        kernels = load_cpu_kernels(isa, threads)
        linear = [Linear(kernels, weight) for weight in weights]
        for tokens in (1, 3, 60):
            x = rng.standard_normal((tokens, 640)).astype(np.float32)
            together = CpuParts(kernels).products(x, linear)
            for kind, got, weight in zip(kinds, together, weights, strict=True):
                assert np.array_equal(got, kernels.matmul(x, weight)), f"{kind}, {tokens} tokens"
    with pytest.raises(UsageError, match="expected float32"):
        kernels.products(x, [weights[0], make(rng, "bf16", 4, 320)[0]])
    plain = rng.standard_normal((5, 640)).astype(np.float32)
    assert np.array_equal(CpuParts(kernels).products(x, [plain])[0], x @ plain.T)


@pytest.mark.parametrize("kind", ["int4-64-b", "int8-64-b", "bf16"])
@pytest.mark.parametrize("tokens", [1, 13])
def test_gated_mlp_is_the_references(kernels, rng, kind, tokens):
    (gate, up, down), wide = zip(
        *(make(rng, kind, *shape) for shape in ((384, 256), (384, 256), (256, 384))), strict=True
    )
    x = 0.02 * rng.standard_normal((tokens, 256)).astype(np.float32)
    linear = [Linear(kernels, weight) for weight in (gate, up, down)]
    got = CpuParts(kernels).situ_mlp(x, *linear, 4.0, 25.0)
    exact = situ_mlp(x.astype(np.float64), *wide, 4.0, 25.0)
    assert np.abs(got - exact).max() <= 2e-6 * np.abs(exact).max()
    seen = []
    CpuParts(kernels).situ_mlp(x, *linear, 4.0, 25.0, lambda stage, array: seen.append(stage) or array)
    assert seen == ["gate", "up", "activated"]
