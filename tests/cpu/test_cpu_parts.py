"""The parts of a layer that the CPU kernels compute, against the reference in float64."""

from time import perf_counter

import numpy as np
import pytest

from k3mlx.clock import Clock
from k3mlx.errors import UsageError
from k3mlx.kernels import cpu_queue
from k3mlx.kernels.cpu import load_cpu_kernels
from k3mlx.kernels.cpu_linear import Linear
from k3mlx.kernels.cpu_parts import FEW_TOKENS, CpuParts
from k3mlx.kernels.cpu_queue import Later
from k3mlx.reference import kda
from k3mlx.reference.attn_res import attn_res_mix
from k3mlx.reference.model import Parts
from k3mlx.reference.moe import select_topk
from k3mlx.reference.ops import rms_norm, sigmoid, situ_mlp
from k3mlx.reference.state import LatentCache

from .test_cpu_matmul import make

NAMES = ("y", "windows", "state")


def settled(parts: CpuParts, *results) -> list[np.ndarray]:
    parts.settle()
    return [np.asarray(result) for result in results]


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
    parts = CpuParts(kernels)
    got = settled(parts, *parts.kda_step(*case))
    for name, part, exact in zip(NAMES, got, kda.kda_step(*in_float64(case)), strict=True):
        error = np.abs(part - exact).max() / np.abs(exact).max()
        assert part.dtype == np.float32
        assert error <= 3e-6, f"{name}: {error:.2g} of the largest, allowed 3e-6"
    for part, copy in zip(case, before, strict=True):
        np.testing.assert_array_equal(part, copy, "an argument was overwritten")


def test_kda_bits_do_not_depend_on_threads_nor_on_pieces(isa, rng):
    case = kda_case(rng, 9, 6, 64)
    parts = CpuParts(load_cpu_kernels(isa, threads=1))
    whole = settled(parts, *parts.kda_step(*case))
    for threads, size in ((2, 9), (3, 4), (8, 1)):
        attention = CpuParts(load_cpu_kernels(isa, threads))
        rows, windows, state = [], case[6], case[7]
        for start in range(0, 9, size):
            fresh = [part[start : start + size] for part in case[:6]]
            y, windows, state = settled(attention, *attention.kda_step(*fresh, windows, state, *case[8:]))
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


@pytest.mark.parametrize(
    ("tokens", "heads", "nope", "ext", "rank", "value", "cached"),
    [
        (1, 6, 128, 64, 512, 128, 1),
        (1, 5, 24, 16, 48, 32, 33),
        (3, 4, 7, 16, 16, 5, 70),
        (16, 3, 32, 48, 96, 16, 16),
        (1, 1, 16, 16, 1008, 8, 100),
        (17, 2, 8, 16, 32, 8, 40),
        (2, 3, 8, 16, 16, 4, 300),
        (1, 2, 8, 16, 16, 4, 9000),
        (2, 2, 8, 4, 20, 8, 9),
    ],
)
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_attention_is_the_references(kernels, rng, tokens, heads, nope, ext, rank, value, cached, spread):
    """With scores near one another and with one that takes all; one chunk of the cache, several, and larger ones;
    widths that C leaves to the reference as well."""
    shapes = (tokens, heads, nope + ext), (cached, rank + ext), (heads * (nope + value), rank)
    q, rows, maps = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    rows[cached // 9] *= spread
    scale = spread / np.sqrt(nope + ext) / np.sqrt(rank)
    parts = CpuParts(kernels)
    (got,) = settled(parts, parts.attend(q, rows, maps, nope, rank, scale))
    exact = Parts().attend(*(array.astype(np.float64) for array in (q, rows, maps)), nope, rank, scale)
    assert got.dtype == np.float32
    assert got.shape == exact.shape == (tokens, heads, value)
    assert np.abs(got - exact).max() <= 2e-6 * max(1, spread) * np.abs(exact).max()


@pytest.mark.parametrize("before", [41, 8187])  # chunks grow beyond 8192 rows
def test_attention_bits_do_not_depend_on_threads_nor_on_pieces(isa, rng, before):
    heads, nope, ext, rank = 6, 16, 16, 64
    q, rows, maps = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((9, heads, nope + ext), (before + 9, rank + ext), (heads * 32, rank))
    )
    first = CpuParts(load_cpu_kernels(isa, threads=1))
    (whole,) = settled(first, first.attend(q, rows, maps, nope, rank, 0.1))
    for threads, size in ((2, 9), (3, 4), (8, 1)):
        parts = CpuParts(load_cpu_kernels(isa, threads))
        pieces = [
            parts.attend(q[t : t + size], rows[: before + min(9, t + size)], maps, nope, rank, 0.1)
            for t in range(0, 9, size)
        ]
        assert np.array_equal(np.concatenate(settled(parts, *pieces)), whole)


@pytest.mark.parametrize("tokens", [1, 3, FEW_TOKENS + 1])
@pytest.mark.parametrize("width", [16, 7168, 20])
def test_norm_sum_and_gate_are_the_references(kernels, rng, tokens, width):
    parts = CpuParts(kernels)
    a, b = (rng.standard_normal((tokens, width)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(width).astype(np.float32)
    wide, other = a.astype(np.float64), b.astype(np.float64)
    normed = rms_norm(wide, weight, 1e-5)
    later = parts.rms_norm(100 * a, weight, 1e-1)
    for got, exact in (
        (later, normed),
        (later + b, normed + other),
        (b + later, normed + other),
        (later + later, 2 * normed),
        (parts.gated(b, 9 * a), other * sigmoid(9 * wide)),
    ):
        (found,) = settled(parts, got)
        assert found.dtype == np.float32
        assert np.abs(found - exact).max() <= 3e-6 * np.abs(exact).max()


@pytest.mark.parametrize(("tokens", "rank"), [(1, 512), (3, 32), (FEW_TOKENS + 1, 32), (2, 20)])
def test_rows_of_the_latent_cache(kernels, rng, tokens, rank):
    """The norm of the first columns and the others as they are, put behind the rows that a cache has."""
    kv, before = (rng.standard_normal((n, rank + 16)).astype(np.float32) for n in (tokens, 5))
    weight, parts = rng.standard_normal(rank).astype(np.float32), CpuParts(kernels)
    old = LatentCache.empty(rank + 16, np.dtype(np.float32)).append(before)
    cache = old.append(parts.latent_rows(kv, weight, 1e-2), parts.fill)
    parts.settle()
    exact = Parts().latent_rows(kv.astype(np.float64), weight, 1e-2)
    assert np.array_equal(cache.rows()[:5], before)
    assert np.array_equal(cache.rows()[5:, rank:], kv[:, rank:])
    assert np.abs(cache.rows()[5:] - exact).max() <= 3e-6 * np.abs(exact).max()
    assert len(old.rows()) == 5


@pytest.mark.parametrize("ext", [16, 8])  # with 8 the attention is numpy's
def test_attention_sees_rows_that_are_not_yet_there(kernels, rng, ext):
    heads, nope, rank = 2, 8, 32
    shapes = (1, rank + ext), (rank,), (1, heads, nope + ext), (heads * 16, rank)
    kv, weight, q, maps = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    found = []
    for parts in (CpuParts(kernels), Parts()):
        old = LatentCache.empty(rank + ext, np.dtype(np.float32)).append(np.ones_like(kv))
        cache = old.append(parts.latent_rows(kv, weight, 1e-5), parts.fill)
        found.append(np.asarray(parts.attend(q, cache.rows(), maps, nope, rank, 0.1)))
    assert np.abs(found[0] - found[1]).max() <= 3e-6 * np.abs(found[1]).max()


@pytest.mark.parametrize("experts", [8, 896, 1025])
def test_routing_is_the_references(kernels, rng, experts):
    logits = rng.standard_normal((3, experts)).astype(np.float32)
    logits[:, 5] = logits[:, 2]  # equal scores: the lower id first
    logits[1, 0], logits[2, 1] = 200, -200
    bias = np.where(np.arange(experts) % 3 == 2, 0.5, 0).astype(np.float32)
    ids, weights = select_topk(logits.astype(np.float64), bias, 7, 2.5)
    chosen, got = CpuParts(kernels).select_topk(logits, bias, 7, 2.5)
    assert np.array_equal(chosen, ids)
    assert chosen.dtype == np.intp
    assert np.abs(got - weights).max() <= 1e-6
    logits[0, 3:] = np.nan
    ids, _ = CpuParts(kernels).select_topk(logits, bias, 7, 2.5)
    assert set(ids[0][:3].tolist()) == {0, 1, 2}
    assert len(set(ids[0].tolist())) == 7


def test_jobs_wait_until_somebody_looks(kernels, rng, monkeypatch):
    """A chain of parts is one call; what numpy would do too early is refused; the clock is told whose time it was."""
    calls = []
    library = cpu_queue._library()

    class Counted:
        def k3_sequence(self, *arguments):
            calls.append(arguments[3])
            return library.k3_sequence(*arguments)

    monkeypatch.setattr(cpu_queue, "_library", Counted)
    parts, clock = CpuParts(kernels), Clock()
    x = rng.standard_normal((2, 64)).astype(np.float32)
    weight, wide = make(rng, "bf16", 64, 64)
    parts.begin(clock)
    clock.enter("attention")
    y = parts.product(parts.rms_norm(x, np.ones(64, np.float32), 1e-5), Linear(kernels, weight))
    clock.enter("mlp")
    z = x + y
    assert isinstance(y, Later)
    assert isinstance(z, Later)
    assert calls == []
    for act in (lambda: np.tanh(z), lambda: 2 * z, lambda: z[0], lambda: z @ x.T, lambda: z - x):
        with pytest.raises(TypeError):
            act()
    with pytest.raises(UsageError, match="same shape"):
        z + x[:1]
    exact = x + rms_norm(x.astype(np.float64), np.ones(64), 1e-5) @ wide.T
    assert np.abs(np.asarray(z) - exact).max() <= 1e-5 * np.abs(exact).max()
    assert calls == [3]
    assert np.asarray(y.reshape(128)).shape == (128,)
    assert calls == [3]
    clock.pause()
    assert min(clock.seconds["attention"], clock.seconds["mlp"]) >= 0
    assert parts.kernels.spent.seconds > 0
    parts.rms_norm(x, np.ones(64, np.float32), 1e-5)
    parts.begin(clock)  # a pass that was given up
    parts.settle()
    assert calls == [3]


def test_a_queues_time_goes_to_the_part_that_asked(kernels, rng):
    moved: dict[str, float] = {}

    class Noting(Clock):
        def move(self, parts, seconds):
            for part, took in zip(parts, seconds, strict=True):
                moved[part] = moved.get(part, 0) + took

    parts, clock = CpuParts(kernels), Noting()
    parts.begin(clock)
    before = kernels.spent.seconds
    for part in ("attention", "mlp"):
        clock.enter(part)
        parts.rms_norm(
            rng.standard_normal((1, 1 << 16)).astype(np.float32), np.ones(1 << 16, np.float32), 1e-5
        )
    clock.enter("head")
    started = perf_counter()
    parts.settle()
    whole = perf_counter() - started
    assert set(moved) == {"attention", "mlp"}
    assert min(moved.values()) > 0
    assert sum(moved.values()) == pytest.approx(kernels.spent.seconds - before)
    assert sum(moved.values()) <= whole


@pytest.mark.parametrize(("tokens", "sources", "width"), [(1, 2, 7168), (3, 9, 96), (2, 64, 16), (1, 3, 20)])
def test_depth_mix_is_the_references(kernels, rng, tokens, sources, width):
    blocks = [rng.standard_normal((tokens, width)).astype(np.float32) for _ in range(sources - 1)]
    partial = 1e3 * rng.standard_normal((tokens, width)).astype(np.float32)
    norm, query = (rng.standard_normal(width).astype(np.float32) for _ in range(2))
    got = np.asarray(CpuParts(kernels).attn_res_mix(blocks, partial, norm, query, 1e-5))
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
            together = map(np.asarray, CpuParts(kernels).products(x, linear))
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
    got = np.asarray(CpuParts(kernels).situ_mlp(x, *linear, 4.0, 25.0))
    exact = situ_mlp(x.astype(np.float64), *wide, 4.0, 25.0)
    assert np.abs(got - exact).max() <= 2e-6 * np.abs(exact).max()
    seen = []
    CpuParts(kernels).situ_mlp(x, *linear, 4.0, 25.0, lambda stage, array: seen.append(stage) or array)
    assert seen == ["gate", "up", "activated"]
