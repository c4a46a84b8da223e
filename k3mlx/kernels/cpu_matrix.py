"""Matrices as the CPU kernels take them: stored bytes with their format, checked once when made.

Owns the formats and the C record of a matrix. Computes nothing and copies nothing: a matrix keeps its arrays alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import UsageError

MXFP4, Q4, Q8, BF16, F16, F32 = range(6)
GROUP = 32  # columns of an MXFP4 scale

# struct k3_matrix of custom_kernels/cpu/k3cpu.h
RECORD = np.dtype(
    [
        *((name, np.uint64) for name in ("weight", "scale", "bias")),
        *((name, np.int64) for name in ("rows", "cols", "row_bytes", "scale_bytes")),
        *((name, np.int32) for name in ("format", "group", "scale_type", "unused")),
    ]
)
_FLOATS = {np.dtype(np.uint16): BF16, np.dtype(np.float16): F16, np.dtype(np.float32): F32}
_SCALE_TYPES = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight [out, in] in one of the stored formats. Arrays of bf16 are uint16 holding the bits."""

    shape: tuple[int, int]
    arrays: tuple[NDArray, ...]  # what the record points at
    record: NDArray  # [1] RECORD

    @cached_property
    def address(self) -> int:
        """Where the record is, for a call."""
        address: int = self.record.ctypes.data
        return address

    @cached_property
    def is_mxfp4(self) -> bool:
        """Whether the matrix is MXFP4, the one format with a scale that means NaN."""
        return int(self.record["format"][0]) == MXFP4

    @cached_property
    def kind(self) -> tuple[int, int, int]:
        """Format, group size and type of the scales: what the C code is compiled for."""
        return tuple(int(self.record[field][0]) for field in ("format", "group", "scale_type"))  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """Bytes a product reads: weights, scales and biases."""
        return sum(array.nbytes for array in self.arrays)

    @classmethod
    def mxfp4(cls, packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Matrix:
        """packed [out, in/2] and scale [out, in/32], uint8, as in the checkpoint (specification §4.3)."""
        if packed.dtype != np.uint8 or scale.dtype != np.uint8:
            raise UsageError(f"MXFP4 parts are {packed.dtype} and {scale.dtype}; expected uint8")
        if packed.ndim != 2 or scale.ndim != 2 or packed.shape != (len(scale), scale.shape[1] * GROUP // 2):
            raise UsageError(
                f"packed is {packed.shape}, scale {scale.shape}; expected [out, in/2] and [out, in/32]"
            )
        shape = packed.shape[0], packed.shape[1] * 2
        return cls(shape, (packed, scale), _record(MXFP4, shape, packed, scale, None, GROUP, 0))

    @classmethod
    def affine(
        cls, packed: NDArray[np.uint32], scales: NDArray, biases: NDArray, bits: int, group_size: int
    ) -> Matrix:
        """w = scale * q + bias in MLX's packing: packed [out, in*bits/32] uint32, scales and biases
        [out, in/group_size], both float32, float16, or uint16 holding bf16; bits 4 or 8, group 32, 64 or 128."""
        if bits not in (4, 8) or group_size not in (32, 64, 128):
            raise UsageError(
                f"{bits} bits in groups of {group_size}; expected 4 or 8 bits, groups of 32, 64 or 128"
            )
        if packed.dtype != np.uint32 or packed.ndim != 2:
            raise UsageError(f"packed is {packed.dtype}{packed.shape}; expected uint32 [out, in*{bits}/32]")
        shape = packed.shape[0], packed.shape[1] * 32 // bits
        expected = shape[0], shape[1] // group_size
        if shape[1] % group_size or scales.shape != expected or biases.shape != expected:
            raise UsageError(
                f"packed is {packed.shape}, scales {scales.shape}, biases {biases.shape}; expected scales and "
                f"biases [out, in/{group_size}] of a matrix {shape}"
            )
        if scales.dtype != biases.dtype or scales.dtype not in _SCALE_TYPES:
            raise UsageError(
                f"scales are {scales.dtype}, biases {biases.dtype}; expected both float32, float16 or bf16 as uint16"
            )
        if scales.strides != biases.strides:
            biases = np.ascontiguousarray(biases)
            scales = np.ascontiguousarray(scales)
        form, scale_type = (Q4 if bits == 4 else Q8), _SCALE_TYPES[scales.dtype]
        record = _record(form, shape, packed, scales, biases, group_size, scale_type)
        return cls(shape, (packed, scales, biases), record)

    @classmethod
    def dense(cls, weight: NDArray) -> Matrix:
        """weight [out, in] float32, float16, or uint16 holding bf16."""
        if weight.ndim != 2 or weight.dtype not in _FLOATS:
            raise UsageError(
                f"weight is {weight.dtype}{weight.shape}; expected [out, in] float32, float16 or bf16 as uint16"
            )
        shape = weight.shape[0], weight.shape[1]
        return cls(shape, (weight,), _record(_FLOATS[weight.dtype], shape, weight, None, None, 0, 0))


@dataclass(frozen=True, eq=False)
class ExpertRecords:
    """An expert's w1 gate [F, L], w2 down [L, F] and w3 up [F, L], checked and described once for many calls."""

    matrices: tuple[Matrix, Matrix, Matrix]
    records: bytes  # of the matrices
    alike: tuple[
        Any, ...
    ]  # shapes and formats: what experts of one call have in common; equal ones are one object

    @classmethod
    def of(cls, expert: Any) -> ExpertRecords:
        """From six MXFP4 arrays (packed and scale of each) or three matrices. Raises UsageError for others."""
        w1, w2, w3 = matrices = _matrices(expert)
        if w1.shape != w3.shape or w2.shape != w1.shape[::-1]:
            raise UsageError(f"w1 {w1.shape}, w2 {w2.shape}, w3 {w3.shape}; expected [F, L], [L, F], [F, L]")
        records = np.concatenate([matrix.record for matrix in matrices])
        alike = tuple((matrix.shape, matrix.kind) for matrix in matrices)
        return cls(matrices, records.tobytes(), _ALIKE.setdefault(alike, alike))

    @cached_property
    def has_mxfp4(self) -> bool:
        """Whether one of the matrices is MXFP4."""
        return any(matrix.is_mxfp4 for matrix in self.matrices)


_ALIKE: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def stack_experts(experts: Sequence[ExpertRecords], latent: int) -> NDArray[np.uint8]:
    """Their records [experts, bytes of three] for the C code, after checking that they are alike.

    `latent` is the width of their input and output. Raises UsageError.
    """
    first, shape = experts[0].alike, experts[0].matrices[0].shape
    if shape[1] != latent:
        raise UsageError(f"w1 is {shape} for inputs of {latent}; expected [F, L] with L = {latent}")
    for expert in experts:
        if expert.alike is not first:
            raise UsageError(
                f"experts of one call differ: {expert.alike} and {first}; expected the shapes and formats of expert 0"
            )
    return np.frombuffer(b"".join([expert.records for expert in experts]), np.uint8).reshape(len(experts), -1)


def _matrices(expert: Any) -> tuple[Matrix, Matrix, Matrix]:
    if len(expert) == 3 and all(isinstance(part, Matrix) for part in expert):
        return tuple(expert)
    if len(expert) == 6:
        return tuple(Matrix.mxfp4(*expert[i : i + 2]) for i in (0, 2, 4))  # type: ignore[return-value]
    raise UsageError(f"an expert of {len(expert)} parts; expected 6 MXFP4 arrays or 3 matrices")


def _record(
    form: int,
    shape: tuple[int, int],
    weight: NDArray,
    scale: NDArray | None,
    bias: NDArray | None,
    group: int,
    scale_type: int,
) -> NDArray:
    if 0 in shape:
        raise UsageError(f"a matrix {shape} is empty; expected at least one row and column")
    for array in (weight, scale, bias):
        if array is not None and array.shape[1] > 1 and array.strides[1] != array.itemsize:
            raise UsageError(f"rows of an array {array.shape} are not contiguous (strides {array.strides})")
    record = np.zeros(1, RECORD)
    record["weight"], record["row_bytes"] = weight.__array_interface__["data"][0], weight.strides[0]
    if scale is not None:
        record["scale"], record["scale_bytes"] = scale.__array_interface__["data"][0], scale.strides[0]
    if bias is not None:
        record["bias"] = bias.__array_interface__["data"][0]
    record["rows"], record["cols"] = shape
    record["format"], record["group"], record["scale_type"] = form, group, scale_type
    return record
