"""Affine codes: MLX's packing, least error, and the same codes however a matrix is cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3mlx.checkpoint.writer import to_bf16
from k3mlx.convert import affine
from k3mlx.convert.affine import LARGEST, quantize

SHAPES = [(1, 64), (7, 192), (33, 320)]


def bf16(bits):
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def as_bf16(values):
    return bf16(to_bf16(np.asarray(values, np.float32)))


def decoded(found, bits, group):
    """scale * code + bias, with codes taken from the words one by one."""
    words = found.codes.astype(np.uint64)
    codes = np.stack([words >> bits * n & (1 << bits) - 1 for n in range(32 // bits)], axis=-1)
    codes = codes.reshape(len(words), -1, group).astype(np.float32)
    values = codes * bf16(found.scales)[..., None] + bf16(found.biases)[..., None]
    return values.reshape(len(words), -1)


def weights(shape, seed=1, kind="normal"):
    rng = np.random.default_rng(seed)
    values = {"normal": rng.standard_normal, "heavy": lambda s: rng.standard_t(3, s)}[kind](shape)
    return as_bf16(values * 0.02)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_mlx_decodes_the_same_values(shape, bits, group):
    mx = pytest.importorskip("mlx.core")
    found = quantize(weights(shape), bits, group)
    with mx.stream(mx.cpu):
        parts = [mx.array(bf16(part)) for part in (found.scales, found.biases)]
        theirs = np.array(mx.dequantize(mx.array(found.codes), *parts, group_size=group, bits=bits))
    np.testing.assert_array_equal(theirs, decoded(found, bits, group))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_error_is_below_that_of_mlx_quantize(bits, kind):
    """Also with scales and biases that MLX keeps in float32, for which ours have to be rounded."""
    mx = pytest.importorskip("mlx.core")
    w = weights((64, 1024), kind=kind)
    found = quantize(w, bits, 64)
    with mx.stream(mx.cpu):
        theirs = np.array(mx.dequantize(*mx.quantize(mx.array(w), 64, bits), 64, bits))
    ours = float(np.square(decoded(found, bits, 64) - w, dtype=np.float64).sum())
    assert ours < (0.9 if bits == 4 else 1.0) * np.square(theirs - w, dtype=np.float64).sum()
    assert found.squared_error == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_narrower_ranges_are_worth_their_trial(kind, monkeypatch):
    w = weights((64, 1024), kind=kind)
    found = quantize(w, 4, 64).squared_error
    monkeypatch.setattr(affine, "SHRINKS", {4: (1.0,)})
    assert found < 0.99 * quantize(w, 4, 64).squared_error


def test_the_lower_half_of_a_group_is_within_half_a_step():
    """The bias is rounded away from the lowest weight, on both sides of zero; the scale may fall short at the top."""
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((40, 64)) + rng.uniform(-9, 9, (40, 1))).astype(np.float32)
    found = quantize(w, 8, 64)
    lower = w <= (w.min(axis=1, keepdims=True) + w.max(axis=1, keepdims=True)) / 2
    steps = np.abs(decoded(found, 8, 64) - w) / bf16(found.scales)
    assert lower.any(axis=1).all()
    assert steps[lower].max() <= 0.501


@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_without_a_range_to_speak_of_spoils_nothing(bits):
    """Its scale would be 2e-39, which has no reciprocal in float32."""
    flat = np.linspace(0, 2e-39 * ((1 << bits) - 1), 64)
    w = np.concatenate([flat, weights((1, 64))[0]])[None].astype(np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = quantize(w, bits, 64)
    assert found.scales[0, 0] == 0
    np.testing.assert_allclose(decoded(found, bits, 64)[0, :64], flat, atol=flat.max())
    alone = quantize(w[:, 64:], bits, 64)
    assert found.squared_error == pytest.approx(alone.squared_error, rel=1e-6)


def test_codes_do_not_depend_on_how_rows_are_cut():
    w = weights((37, 256))
    whole = quantize(w, 4, 64)
    for step in (1, 5, 36):
        cut = [quantize(w[n : n + step], 4, 64) for n in range(0, len(w), step)]
        for part in ("codes", "scales", "biases"):
            joined = np.concatenate([getattr(piece, part) for piece in cut])
            np.testing.assert_array_equal(joined, getattr(whole, part))


@pytest.mark.parametrize("bits", [4, 8])
def test_what_codes_can_say_is_said_exactly(bits):
    """Zeros, a constant, the levels of a scale."""
    levels = np.arange(64, dtype=np.float32) * ((1 << bits) - 1) // 63 * np.float32(0.25) - 2
    w = np.concatenate([np.zeros((1, 64)), np.full((1, 64), -0.75), levels[None]]).astype(np.float32)
    found = quantize(w, bits, 64)
    np.testing.assert_array_equal(decoded(found, bits, 64), w)
    assert found.squared_error == 0


GROUPS = st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=32, max_size=32).map(
    lambda values: as_bf16(values)[None]
)


@settings(max_examples=200, deadline=None)
@given(group=GROUPS, bits=st.sampled_from([4, 8]))
def test_error_is_within_half_a_step(group, bits):
    """In the mean over a group, whatever the numbers; the rounding of scale and bias counts as a part of a step."""
    found = quantize(group, bits, 32)
    got = decoded(found, bits, 32).astype(np.float64)
    top, reach, ends = (1 << bits) - 1, float(np.ptp(group.astype(np.float64))), float(np.abs(group).max())
    step = (reach + ends * 2.0**-7) / top
    rounded = reach * 2.0**-8  # of the scale, at the far end
    assert np.sqrt(np.mean((got - group) ** 2)) <= step / 2 + rounded + 2.0**-100
