"""MXFP4: worked examples, every code with every scale byte, and rounding on the way back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from k3mlx.checkpoint.mxfp4 import decode, encode
from k3mlx.errors import ModelFilesError

VALUES = [
    0,
    0.5,
    1,
    1.5,
    2,
    3,
    4,
    6,
    -0.0,
    -0.5,
    -1,
    -1.5,
    -2,
    -3,
    -4,
    -6,
]  # by code, model specification §4.3


def row(packed: str, scale: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return (
        np.frombuffer(bytes.fromhex(packed), np.uint8)[None],
        np.frombuffer(bytes.fromhex(scale), np.uint8)[None],
    )


def by_definition(packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The definition, number by number."""
    out = np.empty((packed.shape[0], 2 * packed.shape[1]))
    for o, c in np.ndindex(out.shape):
        code = packed[o, c // 2] >> 4 * (c % 2) & 15
        out[o, c] = VALUES[code] * 2.0 ** (int(scale[o, c // 32]) - 127)
    return out


def test_worked_example() -> None:
    packed, scale = row("1032547698BADCFE21436587A9CBED0F", "7E")
    values = decode(packed, scale)
    assert values.dtype == np.float32
    expected = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, -0.0, -0.25, -0.5, -0.75, -1, -1.5, -2, -3]
    expected += [*expected[1:], 0.0]
    np.testing.assert_array_equal(values[0], expected)
    np.testing.assert_array_equal(np.signbit(values[0]), np.signbit(expected))
    assert values[0] @ (np.arange(1, 33, dtype=np.float32) / 32) == -4.5


def test_scales_of_the_worked_example() -> None:
    for scale, factor in (("7F", 1.0), ("80", 2.0), ("79", 0.015625)):
        values = decode(*row("7F" + "00" * 15, scale))
        np.testing.assert_array_equal(values[0, :2], [-6 * factor, 6 * factor])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_byte_with_every_scale(dtype: type) -> None:
    packed = np.tile(np.arange(256, dtype=np.uint8), (255, 1))  # [255, 256]: 16 groups a row
    scale = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    with np.errstate(over="ignore"):
        expected: NDArray = by_definition(packed, scale).astype(dtype)
    values = decode(packed, scale, dtype)
    assert values.dtype == dtype
    assert values.tobytes() == expected.tobytes()  # signs of zero included
    finite = slice(0, 252)
    bits = values[finite].astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "a decoded value is not exact in bf16"


def test_smallest_scale_survives_flush_to_zero() -> None:
    """The bits of subnormal results come from integers: products alone would be lost on a CPU that flushes."""
    bits = decode(*row("1F" + "00" * 15, "00")).view(np.uint32)[0, :2]
    assert [hex(b) for b in bits] == ["0x81400000", "0x200000"]  # -6 · 2^-127 and 0.5 · 2^-127


def test_scale_255_is_refused_with_its_place() -> None:
    packed, scale = np.zeros((3, 32), np.uint8), np.full((3, 2), 127, np.uint8)
    scale[2, 1] = 255
    with pytest.raises(ModelFilesError, match=r"scale byte 255 .* row 2, group 1; expected 0 to 254"):
        decode(packed, scale)


def test_output_into_a_buffer() -> None:
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (37, 48), dtype=np.uint8)
    scale = rng.integers(0, 255, (37, 3), dtype=np.uint8)
    for dtype in (np.float32, np.float64):
        out = np.full((37, 96), np.nan, dtype)
        assert decode(packed, scale, dtype, out) is out
        np.testing.assert_array_equal(out, decode(packed[:, ::1].copy(), scale, dtype))
        strided = np.asfortranarray(packed)
        np.testing.assert_array_equal(out, decode(strided, scale, dtype))


@pytest.mark.parametrize(
    ("packed", "scale", "out"),
    [
        (np.zeros((2, 16), np.int8), np.zeros((2, 1), np.uint8), None),
        (np.zeros((2, 16), np.uint8), np.zeros((2, 1), np.float32), None),
        (np.zeros((2, 17), np.uint8), np.zeros((2, 1), np.uint8), None),
        (np.zeros((2, 16), np.uint8), np.zeros((3, 1), np.uint8), None),
        (np.zeros(16, np.uint8), np.zeros(1, np.uint8), None),
        (np.zeros((2, 16), np.uint8), np.zeros((2, 1), np.uint8), np.empty((2, 31), np.float32)),
        (np.zeros((2, 16), np.uint8), np.zeros((2, 1), np.uint8), np.empty((2, 32), np.float64)),
        (np.zeros((2, 16), np.uint8), np.zeros((2, 1), np.uint8), np.empty((2, 64), np.float32)[:, ::2]),
    ],
)
def test_parts_that_do_not_fit(packed: NDArray, scale: NDArray, out: NDArray | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode(packed, scale, out=out)


def test_decode_to_other_dtype() -> None:
    with pytest.raises(ValueError, match="float32 or float64, not float16"):
        decode(np.zeros((1, 16), np.uint8), np.zeros((1, 1), np.uint8), np.float16)


def test_matrix_larger_than_a_block() -> None:
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 256, (301, 1024), dtype=np.uint8)  # 2048 columns: blocks of 128 rows
    scale = rng.integers(100, 140, (301, 64), dtype=np.uint8)
    for dtype in (np.float32, np.float64):
        values = decode(packed, scale, dtype)
        for part in (slice(0, 2), slice(127, 130), slice(299, 301)):
            np.testing.assert_array_equal(values[part], by_definition(packed[part], scale[part]))


@given(st.integers(0, 2**32 - 1))
def test_encode_inverts_decode(seed: int) -> None:
    """Values come back exactly: a group whose largest code is not 6 or 4 may get a smaller scale, not other values."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (5, 32), dtype=np.uint8)
    scale = rng.integers(4, 251, (5, 2), dtype=np.uint8)
    for dtype in (np.float32, np.float64):
        values = decode(packed, scale, dtype)
        np.testing.assert_array_equal(decode(*encode(values), dtype), values)


def test_scale_is_the_smallest_that_does_not_saturate() -> None:
    for largest, expected in ((6, 127), (6.000001, 128), (3, 126), (3.0000002, 127), (1, 125), (0.75, 124)):
        weight = np.zeros((1, 32), np.float32)
        weight[0, 3] = -largest
        _, scale = encode(weight)
        assert scale[0, 0] == expected, largest
        assert expected == 127 + int(np.ceil(np.log2(np.float32(largest).astype(float) / 6)))


def test_rounding_is_to_nearest_with_ties_to_the_even_code() -> None:
    magnitudes = np.array(VALUES[:8])
    inputs = np.concatenate([np.linspace(0, 6, 961), (magnitudes[1:] + magnitudes[:-1]) / 2])
    inputs = np.concatenate([inputs, np.nextafter(inputs, 9), np.nextafter(inputs, -9)]).clip(0, 6)
    for value in inputs:
        weight = np.full((1, 32), value)
        weight[0, 0], weight[0, 1] = 6, -value  # the 6 fixes the scale at 1
        packed, scale = encode(weight)
        assert scale[0, 0] == 127
        distance = np.abs(magnitudes - value)
        nearest = np.flatnonzero(distance == distance.min())
        code = int(nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0])
        assert packed[0, 1] == code * 17, value
        assert packed[0, 0] == 7 | (code | 8) << 4, value


def test_zeros_and_the_ends_of_the_range() -> None:
    packed, scale = encode(np.zeros((2, 64), np.float32))
    assert not packed.any()
    assert (scale == 127).all()
    tiny = np.full((1, 32), 2.0**-149, np.float32)
    packed, scale = encode(tiny)
    assert scale[0, 0] == 0
    assert not packed.any()
    largest = np.full((1, 32), np.finfo(np.float32).max)
    assert decode(*encode(largest), np.float64)[0, 0] == 2.0**128
    beyond = np.full((1, 32), 1e300)
    packed, scale = encode(beyond)
    assert (scale[0, 0], packed[0, 0]) == (254, 0x77)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_encode_refuses_what_the_format_has_not(value: float) -> None:
    weight = np.ones((2, 32), np.float32)
    weight[1, 5] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        encode(weight)


@pytest.mark.parametrize("shape", [(2, 33), (32,), (1, 1, 32)])
def test_encode_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        encode(np.ones(shape))
