"""MXFP4 matrices: two 4-bit floats (E2M1) a byte, one power-of-two scale byte (E8M0) for 32 columns.

Owns decoding to float and encoding from float (model specification §4.3). Does not know files or names.
"""

import numpy as np
from numpy.typing import DTypeLike, NDArray

from k3mlx.errors import ModelFilesError

GROUP = 32
SCALE_BIAS = 127
SCALE_NAN = 255
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])  # value by code; code 8 is -0

_BLOCK_WEIGHTS = 1 << 18  # rows are decoded in blocks of about this many weights, which stay in the cache


def decode(
    packed: NDArray[np.uint8],
    scale: NDArray[np.uint8],
    dtype: DTypeLike = np.float32,
    out: NDArray | None = None,
) -> NDArray:
    """The matrix [out, in] of packed codes [out, in/2] and scale bytes [out, in/32], in float32 or float64.

    The low nibble of a byte is the even column; value = E2M1[code] · 2^(scale - 127). Exact, but
    float32 has no room for the largest values of scales 253 and 254, which become infinite. With `out`, a
    contiguous array of that shape and dtype, nothing is allocated. Raises ModelFilesError for the scale
    byte 255, which is NaN, and ValueError for arrays that do not fit each other.
    """
    dtype = np.dtype(dtype)
    if dtype not in _TABLES:
        raise ValueError(f"MXFP4 decodes to float32 or float64, not {dtype}")
    _check(packed, scale)
    rows, groups = scale.shape
    if out is None:
        out = np.empty((rows, groups * GROUP), dtype)
    elif out.shape != (rows, groups * GROUP) or out.dtype != dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"out is {out.dtype}{out.shape}; expected contiguous {dtype}{(rows, groups * GROUP)}"
        )
    if scale.size == 0:
        return out
    table, scales = _TABLES[dtype]
    codes = np.ascontiguousarray(packed).view("<u2" if len(table) > 256 else "u1")
    items = out.view(table.dtype)  # one item holds the values of one look-up
    values = out.reshape(rows, groups, GROUP)
    step = max(1, _BLOCK_WEIGHTS // (groups * GROUP))
    with np.errstate(over="ignore"):
        for row in range(0, rows, step):
            block = slice(row, row + step)
            np.take(table, codes[block], out=items[block], mode="clip")
            values[block] *= scales[scale[block]][:, :, None]
    if dtype == np.float32 and scale.min() < len(_SMALL_BITS):
        _decode_small(packed, scale, values)
    return out


def encode(weight: NDArray[np.floating]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Packed codes [out, in/2] and scale bytes [out, in/32] nearest to a matrix [out, in].

    The scale of a group is 2^ceil(log2(max|w| / 6)), clipped to the byte's range: nothing saturates. Values
    round to the nearest magnitude, ties to the even code. A group of zeros gets scale 1. Raises ValueError
    for a matrix whose columns are not a multiple of 32 or that is not finite.
    """
    weight = np.asarray(weight)
    if weight.ndim != 2 or weight.shape[1] % GROUP:
        raise ValueError(f"weight has shape {weight.shape}; expected [out, in] with in a multiple of {GROUP}")
    if weight.dtype not in (np.float32, np.float64):
        weight = weight.astype(np.float32)
    if not np.isfinite(weight).all():
        raise ValueError("weight holds NaN or infinity; MXFP4 has neither")
    rows, columns = weight.shape
    groups = np.abs(weight).reshape(rows, columns // GROUP, GROUP)
    mantissa, exponent = np.frexp(groups.max(axis=2))  # max = mantissa · 2^exponent, 0.5 <= mantissa < 1
    exponent = exponent - 3 + (mantissa > 0.75)  # 6 = 0.75 · 2^3
    exponent = np.where(mantissa == 0, 0, np.clip(exponent, -SCALE_BIAS, SCALE_NAN - 1 - SCALE_BIAS))
    magnitude = np.ldexp(groups, -exponent[:, :, None]).reshape(rows, columns)
    code = (magnitude > 0.25).astype(np.uint8)
    for midpoint, tie_goes_up in ((0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += magnitude >= midpoint if tie_goes_up else magnitude > midpoint
    code |= np.signbit(weight).astype(np.uint8) << 3
    return code[:, ::2] | code[:, 1::2] << 4, (exponent + SCALE_BIAS).astype(np.uint8)


def _check(packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> None:
    if packed.dtype != np.uint8 or scale.dtype != np.uint8:
        raise ValueError(f"MXFP4 parts have dtypes {packed.dtype} and {scale.dtype}; expected uint8 for both")
    if packed.ndim != 2 or scale.ndim != 2 or packed.shape != (scale.shape[0], scale.shape[1] * GROUP // 2):
        raise ValueError(
            f"packed is {packed.shape}, scale {scale.shape}; expected [out, in/2] and [out, in/32]"
        )
    if scale.size and scale.max() == SCALE_NAN:
        row, group = np.argwhere(scale == SCALE_NAN)[0]
        raise ModelFilesError(
            f"MXFP4 scale byte 255 (NaN) at row {row}, group {group}; expected 0 to 254: the file is damaged"
        )


def _decode_small(packed: NDArray, scale: NDArray, values: NDArray) -> None:
    """Rewrite, bit by bit, groups with values subnormal in float32: a CPU may flush those to zero."""
    row, group = np.nonzero(scale < len(_SMALL_BITS))
    codes = _CODES[packed.reshape(*scale.shape, GROUP // 2)[row, group]].reshape(-1, GROUP)
    values.view(np.uint32)[row, group] = _SMALL_BITS[scale[row, group][:, None], codes]


def _float32_bits(code: int, scale: int) -> int:
    """Bits of E2M1[code] · 2^(scale - 127) without floating-point arithmetic."""
    fixed = int(2 * MAGNITUDES[code & 7]) << (scale + 21)  # |value| · 2^149, in units of the smallest float32
    shift = max(0, fixed.bit_length() - 24)
    return (code >> 3 << 31) + (shift << 23) + (fixed >> shift)


_CODES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)  # byte -> codes of columns 2c, 2c + 1
_PAIRS = E2M1[_CODES]  # byte -> values of columns 2c, 2c + 1
_QUADS = np.concatenate([np.tile(_PAIRS, (256, 1)), np.repeat(_PAIRS, 256, axis=0)], axis=1)  # two bytes
_SCALES = np.arange(256, dtype=np.uint32) << 23  # the exponent field of float32; 0 is left to _decode_small
_SMALL_BITS = np.array([[_float32_bits(code, scale) for code in range(16)] for scale in (0, 1)], np.uint32)
# One look-up writes one 16-byte item: the four float32 values of two bytes, or the two float64 values of one.
_TABLES = {
    np.dtype(np.float32): (_QUADS.astype(np.float32).view(np.complex128)[:, 0], _SCALES.view(np.float32)),
    np.dtype(np.float64): (_PAIRS.view(np.complex128)[:, 0], np.ldexp(1.0, np.arange(256) - SCALE_BIAS)),
}
