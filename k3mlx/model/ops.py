"""Linear maps, norms and the gated MLP of the MLX model.

Owns the rule of precision: linear maps take and give the activation dtype, everything elementwise that the
specification computes in float32 is computed in float32 and given back in the activation dtype, so that a
float32 parameter never promotes the residual stream. Source: model specification §3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from k3mlx.on_disk import DiskMatrix
from k3mlx.stages import Probe, no_probe


class Quantized(NamedTuple):
    """A matrix [..., out, in] as MLX's quantised codes; `bits`, `group_size` and `mode` as `mx.quantized_matmul`."""

    codes: mx.array  # uint32 [..., out, in * bits / 32]
    scales: mx.array  # [..., out, in / group_size]
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], self.codes.shape[-1] * 32 // self.bits

    @property
    def size(self) -> int:
        return self.codes.size * 32 // self.bits

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.biases is None else self.biases.nbytes)

    def format(self) -> str:
        return self.mode if self.mode != "affine" else f"{self.bits}-bit affine"


class OnDisk(NamedTuple):
    """A matrix [out, in] that is read at each use, and what it would be in memory: `dtype`."""

    matrix: DiskMatrix
    dtype: mx.Dtype

    def rows(self, ids: mx.array) -> mx.array:
        return mx.array(self.matrix[np.array(ids)]).astype(self.dtype)

    def pieces(self) -> Iterator[mx.array]:
        """All rows, some at a time."""
        for _, values in self.matrix.pieces():
            yield mx.array(values).astype(self.dtype)


Matrix: TypeAlias = "mx.array | Quantized"
Weights = dict[str, Any]  # Matrix for a linear map, mx.array for a vector


def linear(x: mx.array, w: Matrix, transpose: bool = True) -> mx.array:
    """x [..., in] times w [out, in] transposed -> [..., out], in the dtype of x (untransposed: w [in, out]).

    Of w with leading axes, such as heads, each matrix is multiplied with its part of x.
    """
    if isinstance(w, Quantized):
        return mx.quantized_matmul(
            x, w.codes, w.scales, w.biases, transpose=transpose, group_size=w.group_size, bits=w.bits, mode=w.mode
        )  # fmt: skip
    return x @ (w.swapaxes(-1, -2) if transpose else w)


def rows(w: Matrix | OnDisk, ids: mx.array, dtype: mx.Dtype) -> mx.array:
    """Rows ids [T] of a matrix [V, D] -> [T, D] of `dtype`."""
    if isinstance(w, OnDisk):
        return w.rows(ids)
    if not isinstance(w, Quantized):
        return w[ids]
    biases = None if w.biases is None else w.biases[ids]
    return mx.dequantize(
        w.codes[ids], w.scales[ids], biases, group_size=w.group_size, bits=w.bits, mode=w.mode, dtype=dtype
    )  # fmt: skip


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, statistics in float32, in the dtype of x."""
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


def situ(gate: mx.array, up: mx.array, beta: float, linear_beta: float) -> mx.array:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), in float32 inside.

    Source: model specification §2.6.1.
    """
    dtype = gate.dtype
    gate, up = gate.astype(mx.float32), up.astype(mx.float32)
    activated = beta * mx.tanh(gate / beta) * mx.sigmoid(gate) * (linear_beta * mx.tanh(up / linear_beta))
    return activated.astype(dtype)


def gated(x: mx.array, gate: mx.array) -> mx.array:
    """x * sigmoid(gate) with the sigmoid in float32, in the dtype of x."""
    return (x * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)


# One launch each on a GPU. On the CPU compiling would mean running a C++ compiler, and its gain is nothing.
_fused_situ = mx.compile(situ, shapeless=True)
_fused_gated = mx.compile(gated, shapeless=True)


def situ_on(device: str) -> Callable[..., mx.array]:
    """`situ` for `metal`, `cuda` or `cpu`."""
    return situ if device == "cpu" else _fused_situ


def gated_on(device: str) -> Callable[..., mx.array]:
    """`gated` for `metal`, `cuda` or `cpu`."""
    return gated if device == "cpu" else _fused_gated


def situ_mlp(
    x: mx.array,
    w_gate: Matrix,
    w_up: Matrix,
    w_down: Matrix,
    beta: float,
    linear_beta: float,
    probe: Probe = no_probe,
    device: str = "cpu",
) -> mx.array:
    """SiTU(x W_gate^T, x W_up^T) W_down^T on a device; x [T, in] -> [T, out]."""
    gate, up = probe("gate", linear(x, w_gate)), probe("up", linear(x, w_up))
    activated = probe("activated", situ_on(device)(gate, up, beta, linear_beta))
    return linear(activated, w_down)
