"""Chunkwise against sequential KDA: five kinds of decay, tolerances of the specification (§2.4)."""

import numpy as np
import pytest

from k3mlx.reference.kda import kda_chunk, kda_recurrent
from k3mlx.reference.ops import l2_norm

HEADS, KEY, VALUE = 2, 128, 96  # values narrower than keys: a transposed state cannot pass


def inputs(kind: str, tokens: int, rng: np.random.Generator):
    """(q, k, v, g, beta, state) in float64 with the named decay."""
    shape = tokens, HEADS, KEY
    q, k = rng.standard_normal(shape), rng.standard_normal(shape)
    beta = rng.uniform(0.05, 0.95, (tokens, HEADS))
    if kind == "saturated":
        g = rng.uniform(-5, -4.95, shape)
    elif kind == "broad":
        g = -5 / (1 + np.exp(-3 * rng.standard_normal(shape)))
    elif kind == "weak":
        g = -rng.uniform(0, 1e-3, shape)
    elif kind == "half":
        channel = np.where(np.arange(KEY) % 2 == 0, -4.999, -1e-3)
        g = channel * rng.uniform(0.99, 1, shape)
    else:  # near-parallel keys, weak decay, beta near 1
        k = rng.standard_normal((1, HEADS, KEY)) + 0.02 * k
        g = -rng.uniform(0, 1e-3, shape)
        beta = rng.uniform(0.98, 1, (tokens, HEADS))
    q, k = l2_norm(q, 1e-6) * KEY**-0.5, l2_norm(k, 1e-6)
    v = rng.standard_normal((tokens, HEADS, VALUE))
    return q, k, v, g, beta, rng.standard_normal((HEADS, KEY, VALUE))


def worst(got, expected):
    """Largest deviation relative to the largest entry."""
    return np.abs(got - expected).max() / np.abs(expected).max()


# (kind, float64 o, float64 state, float32 o, float32 state): for float32 the larger of the table's chunk
# and sequential columns, since both forms round. Draws of one kind differ: half as much again is allowed.
TABLE = [
    ("saturated", 7e-16, 3e-16, 3.4e-7, 1.8e-7),
    ("broad", 1e-15, 1e-14, 1.1e-6, 3.8e-6),
    ("weak", 3e-15, 3e-15, 9.5e-7, 1.1e-6),
    ("half", 8e-15, 5e-14, 3.3e-6, 1.9e-5),
    ("parallel", 6e-14, 7e-14, 8.2e-6, 1.3e-5),
]
MARGIN = 1.5


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 1000, 8192])
@pytest.mark.parametrize(("kind", "o64", "s64", "o32", "s32"), TABLE, ids=[row[0] for row in TABLE])
def test_chunk_equals_recurrence(kind, o64, s64, o32, s32, tokens):
    data = inputs(kind, tokens, np.random.default_rng(tokens))
    o, state = kda_recurrent(*data)
    for dtype, o_bound, s_bound in ((np.float64, o64, s64), (np.float32, o32, s32)):
        got_o, got_state = kda_chunk(*(a.astype(dtype) for a in data))
        assert got_o.dtype == got_state.dtype == dtype
        assert np.isfinite(got_o).all()
        print(f"{kind} T={tokens} {np.dtype(dtype)}: o {worst(got_o, o):.1e} S {worst(got_state, state):.1e}")
        assert worst(got_o, o) <= MARGIN * o_bound, "output"
        assert worst(got_state, state) <= MARGIN * s_bound, "state"


def test_chunk_size_does_not_matter():
    data = inputs("broad", 100, np.random.default_rng(0))
    o, state = kda_recurrent(*data)
    for chunk in (1, 16, 20, 32, 100, 128):
        got_o, got_state = kda_chunk(*data, chunk=chunk)
        np.testing.assert_allclose(got_o, o, atol=1e-13)
        np.testing.assert_allclose(got_state, state, atol=1e-13)
