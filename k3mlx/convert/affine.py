"""Matrices to MLX's affine codes by least squared error.

Owns the search and the packing; decoding is `checkpoint.quantized`. A weight of a group is
scale * code + bias with scale and bias in bfloat16, codes 0 to 2^bits - 1. For each group of a row the search
minimises the sum of (weight - decoded weight)^2, decoded with the scale and bias as they are stored.

Scales and biases are bfloat16 because MLX computes in their dtype: float32 ones would turn bfloat16 activations
into float32. It costs little: the codes are chosen after scale and bias have been rounded, so what rounding
moves, codes make good (normal weights, 8 bits: relative error 0.53 % against 0.53 % with float32 ones; 4 bits:
no difference in three digits).

Every operation is elementwise or a sum in a fixed order within a group, so codes do not depend on how a matrix is
cut into blocks, on threads, or on the vector width of a machine.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.writer import to_bf16

SHRINKS = {4: (1.0, 0.9, 0.8), 8: (1.0,)}  # parts of a group's range that codes are first tried on
REFINEMENTS = {4: 4, 8: 0}  # times that scale and bias are fitted to the codes, and the codes to them
LARGEST = 2.0**50  # of a weight: sums of squares stay far from infinity
_TINY = np.float32(2.0**-126)  # a smaller scale has no usable reciprocal

Floats = NDArray[np.float32]


class Affine(NamedTuple):
    """A matrix [R, K] as codes U32 [R, K * bits / 32], scales and biases (bfloat16 bits) [R, K / group_size]."""

    codes: NDArray[np.uint32]
    scales: NDArray[np.uint16]
    biases: NDArray[np.uint16]
    squared_error: float


def quantize(weights: Floats, bits: int, group_size: int) -> Affine:
    """The codes of weights [R, K], at most LARGEST in size; `group_size` divides K and is a multiple of 32 / bits."""
    rows, columns = weights.shape
    groups = _Groups(weights.reshape(-1, group_size), bits)
    fit = groups.search(SHRINKS[bits], REFINEMENTS[bits])
    shape = rows, columns // group_size
    return Affine(
        _pack(groups.codes(fit).astype(np.uint8), bits).reshape(rows, -1),
        to_bf16(fit.scale).reshape(shape),
        to_bf16(fit.bias).reshape(shape),
        float(fit.error.sum(dtype=np.float64)),
    )


class _Fit(NamedTuple):
    """Scale, bias and squared error of each group, all [G]."""

    scale: Floats
    bias: Floats
    error: Floats

    def or_better(self, other: _Fit) -> _Fit:
        """For each group the fit with the smaller error, this one if they are equal."""
        better = other.error < self.error
        return _Fit(*(np.where(better, theirs, mine) for mine, theirs in zip(self, other, strict=True)))


class _Groups:
    """Weights of groups, a column each [g, G], and two arrays of that size to work in."""

    def __init__(self, weights: Floats, bits: int) -> None:
        self._w = np.ascontiguousarray(weights.T)
        self._top = np.float32((1 << bits) - 1)
        self._codes, self._other = np.empty_like(self._w), np.empty_like(self._w)

    def search(self, shrinks: tuple[float, ...], refinements: int) -> _Fit:
        """The best of ranges around the middle of each group, then of fits to the codes of the best so far."""
        low, high = self._w.min(axis=0), self._w.max(axis=0)
        middle, half = (low + high) * np.float32(0.5), (high - low) * np.float32(0.5)
        fits = []
        for shrink in shrinks:
            reach = half * np.float32(shrink)
            bias = _bf16_below(middle - reach)
            fits.append(self._fit((middle + reach - bias) / self._top, bias))
        best = reduce(_Fit.or_better, fits)
        for _ in range(refinements):
            best = best.or_better(self._refit(best))
        return best

    def codes(self, fit: _Fit) -> Floats:
        """The nearest codes for each group's scale and bias, valid until the next call; 0 where the scale is."""
        codes = np.subtract(self._w, fit.bias, out=self._codes)
        codes *= _ratio(np.ones_like(fit.scale), fit.scale)
        np.rint(codes, out=codes)
        return np.clip(codes, 0, self._top, out=codes)

    def _fit(self, scale: Floats, bias: Floats) -> _Fit:
        """The error of a scale, rounded here, and a bias with the codes that are best for them."""
        scale = _bf16(scale)
        scale[scale < _TINY] = 0
        fit = _Fit(scale, bias, np.empty_like(scale))
        error = self.codes(fit)
        error *= scale
        error += bias
        error -= self._w
        error *= error
        error.sum(axis=0, out=fit.error)
        return fit

    def _refit(self, fit: _Fit) -> _Fit:
        """Least squares for scale and bias with the codes of a fit, the bias rounded first."""
        codes, products, count = self.codes(fit), self._other, np.float32(len(self._w))
        sum_w, sum_c = self._w.sum(axis=0), codes.sum(axis=0)
        sum_cw = np.multiply(codes, self._w, out=products).sum(axis=0)
        sum_cc = np.multiply(codes, codes, out=products).sum(axis=0)
        scale = _ratio(count * sum_cw - sum_c * sum_w, count * sum_cc - sum_c * sum_c)
        bias = _bf16((sum_w - scale * sum_c) / count)
        return self._fit(_ratio(sum_cw - bias * sum_c, sum_cc), bias)


def _ratio(above: Floats, below: Floats) -> Floats:
    """above / below where that is a division by something positive, else 0."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _bf16(x: Floats) -> Floats:
    """Rounded to the nearest bfloat16."""
    return np.left_shift(to_bf16(x), 16, dtype=np.uint32).view(np.float32)


def _bf16_below(x: Floats) -> Floats:
    """Rounded to the nearest bfloat16 that is not above."""
    cut = x.view(np.uint32) & np.uint32(0xFFFF0000)  # towards zero
    return (cut + np.uint32(0x10000) * ((cut != x.view(np.uint32)) & (x < 0))).view(np.float32)


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes [g, G] to words [G, g * bits / 32], the first code in the lowest bits, as MLX has them."""
    each = 8 // bits
    packed = codes[::each].copy()
    for place in range(1, each):
        packed |= codes[place::each] << bits * place
    return np.ascontiguousarray(packed.T).view("<u4")
