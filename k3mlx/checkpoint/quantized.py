"""Matrices in MLX's quantised layouts: what a stored one is made of, and its values in numpy.

Owns the recognition of a layout from shapes and the decoding of the affine and mxfp4 ones. Knows no names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from k3mlx.errors import ModelFilesError

from . import mxfp4
from .safetensors import TensorInfo

WORD_BITS = 32
_DECODED = 1 << 20  # numbers decoded at a time
_MODES = {
    (4, 32): "mxfp4",
    (8, 32): "mxfp8",
    (4, 16): "nvfp4",
}  # of matrices with byte scales, by bits and group


@dataclass(frozen=True)
class QuantizedInfo:
    """A stored matrix [..., out, in]: codes U32 [..., out, in * bits / 32], scales and, for affine ones, biases
    [..., out, in / group_size]. `mode` is what `mx.quantized_matmul` calls the layout."""

    shape: tuple[int, ...]
    codes: TensorInfo
    scales: TensorInfo
    biases: TensorInfo | None
    bits: int
    group_size: int
    mode: str

    @classmethod
    def find(cls, parts: Mapping[str, TensorInfo], columns: int) -> QuantizedInfo:
        """Recognise a matrix with rows of `columns` from its stored `weight`, `scales` and maybe `biases`.

        Raises ModelFilesError when they do not fit together or the layout is not known.
        """
        codes, scales, biases = parts["weight"], parts["scales"], parts.get("biases")
        words, groups = codes.shape[-1], scales.shape[-1]
        leading = codes.shape[:-1]
        bits, rest = divmod(words * WORD_BITS, columns)
        group, odd = divmod(columns, groups) if groups else (0, 1)
        mode = "affine" if biases is not None else _MODES.get((bits, group))
        fits = scales.shape[:-1] == leading and (biases is None or biases.shape == scales.shape)
        if rest or odd or not fits or mode is None or codes.dtype != "U32" or bits not in (2, 3, 4, 5, 6, 8):
            found = ", ".join(f"{name} {info.dtype} {list(info.shape)}" for name, info in parts.items())
            raise ModelFilesError(
                f"{codes.path}: tensor '{codes.name}' is quantised in a way this package does not know: {found}"
                f" for rows of {columns}"
            )
        return cls((*leading, columns), codes, scales, biases, bits, group, mode)

    def rows(self, start: int, stop: int) -> QuantizedInfo:
        """Rows start to stop of the first axis."""
        biases = None if self.biases is None else rows_of(self.biases, start, stop)
        codes, scales = rows_of(self.codes, start, stop), rows_of(self.scales, start, stop)
        shape = stop - start, *self.shape[1:]
        return QuantizedInfo(shape, codes, scales, biases, self.bits, self.group_size, self.mode)


def rows_of(info: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Rows start to stop of the first axis of a stored tensor, as a tensor of its own."""
    each = info.nbytes // info.shape[0] if info.shape[0] else 0
    return info._replace(
        shape=(stop - start, *info.shape[1:]), offset=info.offset + start * each, nbytes=(stop - start) * each
    )


def dequantize(
    codes: NDArray[np.uint32],
    scales: NDArray,
    biases: NDArray | None,
    info: QuantizedInfo,
    dtype: DTypeLike = np.float32,
) -> NDArray:
    """The values of a matrix: scale * code + bias, or those of MXFP4; scales and biases already widened.

    Raises ModelFilesError for a layout that only MLX decodes.
    """
    rows = math.prod(info.shape[:-1])
    packed = codes.reshape(rows, -1).view(np.uint8)
    if info.mode == "mxfp4":
        return mxfp4.decode(packed, scales.reshape(rows, -1), dtype).reshape(info.shape)
    if info.mode != "affine" or info.bits not in (2, 4, 8):
        raise ModelFilesError(
            f"{info.codes.path}: tensor '{info.codes.name}' is {info.bits}-bit {info.mode}, which numpy does not"
            " decode; use --backend mlx"
        )
    assert biases is not None
    scales, biases = (part.reshape(rows, -1, 1).astype(dtype, copy=False) for part in (scales, biases))
    values = np.empty((rows, info.shape[-1]), dtype)
    groups = values.reshape(rows, -1, info.group_size)
    step = max(1, _DECODED // info.shape[-1])
    for start in range(0, rows, step):
        block = slice(start, start + step)
        _spread(packed[block], info.bits, values[block])
        groups[block] *= scales[block]
        groups[block] += biases[block]
    return values.reshape(info.shape)


def _spread(packed: NDArray[np.uint8], bits: int, out: NDArray) -> None:
    """Codes of `bits` bits, the first in the lowest ones of a byte, as numbers: [R, n] into [R, n * 8 / bits]."""
    each = 8 // bits
    for place in range(each):
        out[:, place::each] = packed >> bits * place & ((1 << bits) - 1)
