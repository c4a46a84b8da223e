"""Multi-head latent attention without positions: expanded and absorbed attention over the latent cache.

Owns the arithmetic between the projections of an MLA layer. The cache holds, for each token, the
normalised latent (r values) and the extra key part (e values) shared by all heads.
Source: model specification §2.5.
"""

import numpy as np

from .ops import Array, softmax

KEY_BLOCK = 1024  # cached tokens expanded at once
SCORE_ELEMENTS = 1 << 24  # scores held at once by the absorbed form


def split_kv_b(kv_b: Array, heads: int, nope: int) -> tuple[Array, Array]:
    """The stored [H*(n+m), r] matrix as key maps U [H, n, r] and value maps O [H, m, r]."""
    per_head = kv_b.reshape(heads, -1, kv_b.shape[-1])
    return per_head[:, :nope], per_head[:, nope:]


def per_head(x: Array, maps: Array) -> Array:
    """Each head's vectors times the head's matrix: x [T, H, a], maps [H, a, b] -> [T, H, b]."""
    return (x.transpose(1, 0, 2) @ maps).transpose(1, 0, 2)


def attend(
    q_nope: Array,
    q_ext: Array,
    latent: Array,
    ext: Array,
    U: Array,
    O: Array,
    scale: float,
) -> Array:
    """Causal attention of the last T cached tokens over the whole cache, in the cheaper of two forms.

    q_nope [T, H, n]; q_ext [T, H, e]; latent [S, r] and ext [S, e], S >= T, the newest token last;
    U [H, n, r]; O [H, m, r]; scale multiplies the scores. Returns [T, H, m].
    """
    tokens, _, n = q_nope.shape
    cached, r = latent.shape
    m, e = O.shape[1], ext.shape[1]
    expanded = tokens * cached * (n + e + m) + cached * r * (n + m)
    absorbed = tokens * cached * (r + e + r) + tokens * r * (n + m)
    if absorbed <= expanded:
        return attend_absorbed(q_nope, q_ext, latent, ext, U, O, scale)
    return attend_expanded(q_nope, q_ext, latent, ext, U, O, scale)


def attend_absorbed(
    q_nope: Array,
    q_ext: Array,
    latent: Array,
    ext: Array,
    U: Array,
    O: Array,
    scale: float,
) -> Array:
    """`attend` as multi-query attention in the latent space: keys are never expanded.

    All heads share the keys, so their queries are the rows of one matrix: a product a head would read the cache for
    each of them.
    """
    tokens, heads, _ = q_nope.shape
    cached, rank = latent.shape
    q_lat = per_head(q_nope, U).transpose(1, 0, 2)  # [H, T, r]
    q_ext = q_ext.transpose(1, 0, 2)  # [H, T, e]
    out = np.empty((tokens, heads, O.shape[1]), q_nope.dtype)
    step = max(1, SCORE_ELEMENTS // (heads * cached))
    for t0 in range(0, tokens, step):
        rows = slice(t0, min(t0 + step, tokens))
        scores = q_lat[:, rows].reshape(-1, rank) @ latent.T
        scores += q_ext[:, rows].reshape(-1, ext.shape[1]) @ ext.T
        scores = (scores * q_nope.dtype.type(scale)).reshape(heads, -1, cached)
        scores[:, _future(rows, 0, cached, cached - tokens)] = -np.inf
        mixed = softmax(scores).reshape(-1, cached) @ latent
        out[rows] = per_head(mixed.reshape(heads, -1, rank).transpose(1, 0, 2), O.transpose(0, 2, 1))
    return out


def attend_expanded(
    q_nope: Array, q_ext: Array, latent: Array, ext: Array, U: Array, O: Array, scale: float
) -> Array:
    """`attend` with per-head keys and values, expanded KEY_BLOCK cached tokens at a time.

    The softmax runs over the blocks with a running maximum, so the expanded cache never exists whole.
    """
    tokens, heads, _ = q_nope.shape
    cached = len(latent)
    q = np.concatenate([q_nope, q_ext], axis=-1).transpose(1, 0, 2) * q_nope.dtype.type(scale)  # [H, T, n+e]
    total = np.zeros((heads, tokens, O.shape[1]), q.dtype)
    weight = np.zeros((heads, tokens, 1), q.dtype)
    peak = np.full((heads, tokens, 1), -np.inf, q.dtype)
    for s0 in range(0, cached, KEY_BLOCK):
        s1 = min(s0 + KEY_BLOCK, cached)
        first = max(0, s0 - (cached - tokens))  # earlier queries see nothing of this block
        rows = slice(first, tokens)
        shared = np.broadcast_to(ext[s0:s1], (heads, s1 - s0, ext.shape[1]))
        keys = np.concatenate([latent[s0:s1] @ U.transpose(0, 2, 1), shared], axis=-1)  # [H, S', n+e]
        values = latent[s0:s1] @ O.transpose(0, 2, 1)  # [H, S', m]
        scores = q[:, rows] @ keys.transpose(0, 2, 1)
        scores[:, _future(rows, s0, s1, cached - tokens)] = -np.inf
        new_peak = np.maximum(peak[:, rows], scores.max(axis=-1, keepdims=True))
        probs = np.exp(scores - new_peak)
        carried = np.exp(peak[:, rows] - new_peak)
        total[:, rows] = carried * total[:, rows] + probs @ values
        weight[:, rows] = carried * weight[:, rows] + probs.sum(axis=-1, keepdims=True)
        peak[:, rows] = new_peak
    return (total / weight).transpose(1, 0, 2)


def _future(rows: slice, s0: int, s1: int, before: int) -> np.ndarray:
    """Mask [len(rows), s1 - s0]: True where a cached token comes after the query; query 0 is cached
    token number `before`."""
    return np.arange(s0, s1) > before + np.arange(rows.start, rows.stop)[:, None]
