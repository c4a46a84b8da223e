"""Checks the CPU kernels of this machine against float64 in a fraction of a second.

Owns small cases of every format, of the fused experts and of attention. Who acts on a failure is the caller's business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint import mxfp4
from k3mlx.reference import attn_res, kda, moe, ops
from k3mlx.reference.model import Parts
from k3mlx.reference.moe import mix_experts

from .cpu import CpuKernels
from .cpu_matrix import Matrix
from .cpu_parts import CpuParts

TOLERANCE = 1e-6  # of the sum of the products' magnitudes, the scale on which float32 sums err
EXPERTS_TOLERANCE = 2e-6  # of the largest output: two products and SiTU behind one another
PARTS_TOLERANCE = 3e-6  # of the largest element
_TOKENS = (1, 3, 18)  # the ways a tile is computed


class Check(NamedTuple):
    """Outcome of one case: `worst` is the largest relative error, NaN where a result was not finite."""

    name: str
    ok: bool
    worst: float
    tolerance: float


def verify(kernels: CpuKernels) -> list[Check]:
    """Compare every format's product, the fused experts and the parts of attention with float64."""
    rng = np.random.default_rng(6)
    checks = []
    for name, matrix, weight in _matrices(rng):
        worst = 0.0
        for tokens in _TOKENS:
            x = rng.standard_normal((tokens, weight.shape[1])).astype(np.float32)
            worst = _largest(worst, relative_error(kernels.matmul(x, matrix), x, weight))
        checks.append(Check(name, worst <= TOLERANCE, worst, TOLERANCE))
    worst = _largest(*(_experts_error(kernels, rng, tokens) for tokens in (1, 7)))
    checks.append(Check("experts_mix", worst <= EXPERTS_TOLERANCE, worst, EXPERTS_TOLERANCE))
    for name, error in _PARTS.items():
        worst = error(CpuParts(kernels), rng)
        checks.append(Check(name, worst <= PARTS_TOLERANCE, worst, PARTS_TOLERANCE))
    return checks


def relative_error(got: NDArray, x: NDArray, weight: NDArray) -> float:
    """max |got - x W^T| / (|x| |W|^T) with the product taken in float64; x [T, in], weight [out, in] float64."""
    wide = x.astype(np.float64)
    magnitude = np.abs(wide) @ np.abs(weight).T
    error = np.abs(got - wide @ weight.T)
    return float((error / np.maximum(magnitude, np.finfo(np.float32).tiny)).max())


def decode_affine(packed: NDArray, scales: NDArray, biases: NDArray, bits: int, group: int) -> NDArray:
    """scale * q + bias in float64 from MLX's packing; scales and biases float32, float16 or bf16 as uint16."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (packed[:, :, None] >> shifts & (2**bits - 1)).reshape(len(packed), -1)
    wide = [np.repeat(widen_float64(a), group, axis=1) for a in (scales, biases)]
    return codes * wide[0] + wide[1]


def widen_float64(array: NDArray) -> NDArray[np.float64]:
    """Floats, or bf16 bits in uint16, as float64."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _matrices(rng: np.random.Generator) -> list[tuple[str, Matrix, NDArray]]:
    rows, cols = 37, 640  # rows are no multiple of a tile; columns span more than one decoded block
    packed, scale = random_mxfp4(rng, rows, cols)
    found = [("mxfp4", Matrix.mxfp4(packed, scale), mxfp4.decode(packed, scale, np.float64))]
    for bits, group in ((4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)):
        words = rng.integers(0, 1 << 32, (rows, cols * bits // 32), dtype=np.uint32)
        for scales_as in (np.float32, np.float16, np.uint16):
            scales, biases = (
                _narrow(rng.standard_normal((rows, cols // group)), np.dtype(scales_as)) for _ in range(2)
            )
            name = f"int{bits} groups of {group}, {_NAMES[np.dtype(scales_as)]} scales"
            matrix = Matrix.affine(words, scales, biases, bits, group)
            found.append((name, matrix, decode_affine(words, scales, biases, bits, group)))
    for kept_as in (np.float32, np.float16, np.uint16):
        weight = _narrow(rng.standard_normal((rows, cols - 3)), np.dtype(kept_as))
        found.append((_NAMES[weight.dtype], Matrix.dense(weight), widen_float64(weight)))
    return found


def random_mxfp4(rng: np.random.Generator, rows: int, cols: int) -> tuple[NDArray, NDArray]:
    """packed [rows, cols/2] and scale [rows, cols/32] with weights of about 1."""
    packed = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    return packed, rng.integers(123, 129, (rows, cols // 32), dtype=np.uint8)


def _experts_error(kernels: CpuKernels, rng: np.random.Generator, tokens: int) -> float:
    latent, inner, count = 96, 64, 3
    experts = []
    for _ in range(count):
        parts = [random_mxfp4(rng, *shape) for shape in ((inner, latent), (latent, inner), (inner, latent))]
        experts.append(tuple(array for pair in parts for array in pair))
    x = (0.2 * rng.standard_normal((tokens, latent))).astype(np.float32)
    ids = np.stack([rng.permutation(count)[:2] for _ in range(tokens)])
    weights = rng.random(ids.shape)
    rows = [np.nonzero(ids == expert) for expert in range(count)]
    got = kernels.experts_mix(
        x, experts, [tokens for tokens, _ in rows], [weights[pair] for pair in rows], 4.0, 25.0
    )
    wide = [tuple(mxfp4.decode(e[i], e[i + 1], np.float64) for i in (0, 2, 4)) for e in experts]
    expected = mix_experts(
        x.astype(np.float64), ids, weights, lambda chosen: [(int(i), wide[i]) for i in chosen], 4.0, 25.0
    )
    return _of_largest(got, expected)


def _kda_error(parts: CpuParts, rng: np.random.Generator) -> float:
    tokens, heads, width, taps = 3, 3, 128, 4
    P = heads * width
    shapes: list[tuple[int, ...]] = [
        *[(tokens, P)] * 4, (tokens, heads), (tokens, P), (3, taps - 1, P), (heads, width, width),
        (3, P, taps), (heads,), (P,), (width,),
    ]  # fmt: skip
    arrays: list[Any] = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    limits: Any = (-5.0, 1e-5, 1e-6)
    exact = kda.kda_step(*(array.astype(np.float64) for array in arrays), *limits)
    got = parts.kda_step(*arrays, *limits)
    parts.settle()
    return float(np.max([_of_largest(a, b) for a, b in zip(got, exact, strict=True)]))


def _attention_error(parts: CpuParts, rng: np.random.Generator) -> float:
    tokens, heads, nope, ext, rank, value, cached = 2, 5, 24, 16, 48, 32, 70
    shapes = ((tokens, heads, nope + ext), (cached, rank + ext), (heads * (nope + value), rank))
    q, rows, maps = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    wide_q, wide_rows, wide_maps = (array.astype(np.float64) for array in (q, rows, maps))
    exact = Parts().attend(wide_q, wide_rows, wide_maps, nope, rank, 0.05)
    return _of_largest(parts.attend(q, rows, maps, nope, rank, 0.05), exact)


def _mix_error(parts: CpuParts, rng: np.random.Generator) -> float:
    *sources, norm, query = (
        rng.standard_normal(shape).astype(np.float32) for shape in [(2, 160)] * 3 + [(160,)] * 2
    )
    wide = [array.astype(np.float64) for array in (*sources, norm, query)]
    exact = attn_res.attn_res_mix(wide[:2], wide[2], wide[3], wide[4], 1e-5)
    return _of_largest(parts.attn_res_mix(sources[:2], sources[2], norm, query, 1e-5), exact)


def _norm_error(parts: CpuParts, rng: np.random.Generator) -> float:
    """Norm and sum, the second waiting for the first."""
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 160), (160,)))
    exact = x + ops.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-5)
    return _of_largest(x + parts.rms_norm(x, weight, 1e-5), exact)


def _route_error(parts: CpuParts, rng: np.random.Generator) -> float:
    logits, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 40), (40,)))
    ids, weights = moe.select_topk(logits.astype(np.float64), bias, 5, 2.5)
    chosen, got = parts.select_topk(logits, bias, 5, 2.5)
    return _of_largest(got, weights) if np.array_equal(chosen, ids) else np.nan


def _of_largest(got: Any, exact: NDArray) -> float:
    return float(np.abs(np.asarray(got) - exact).max() / np.abs(exact).max())


_PARTS = {
    "kda_step": _kda_error,
    "attend": _attention_error,
    "attn_res_mix": _mix_error,
    "rms_norm": _norm_error,
    "select_topk": _route_error,
}
_NAMES = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(np.uint16): "bf16"}


def _narrow(values: NDArray, dtype: np.dtype) -> NDArray:
    if dtype == np.uint16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _largest(a: float, b: float) -> float:
    return float(np.maximum(a, b))  # keeps NaN, which then fails the comparison
