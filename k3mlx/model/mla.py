"""Multi-head latent attention without positions, over the latent cache and the rows of the present step.

Owns the arithmetic between the projections of an MLA layer, in two forms: absorbed (keys stay latent) and
expanded (keys and values per head, a block of cached tokens at a time). Scores, softmax and the weighted
sum are float32. The cache itself is in `state.py`. Source: model specification §2.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx

from .ops import Matrix, Quantized, linear
from .state import LatentCache, LayerState

SCORE_ELEMENTS = 1 << 24  # scores held at once
BLOCK_MAX = 1 << 15  # cached tokens widened to float32 at once
BLOCK_MIN = 64


class Span:
    """The tokens that T new ones attend to: a cache whose buffer has empty rows behind it, and themselves.

    The rows are seen at the buffer's own length, so that array sizes stay the same from token to token.
    """

    def __init__(self, cache: LatentCache, tokens: int) -> None:
        self.length = cache.length
        self.room = cache.room() if cache.length else 0
        self.tokens = tokens
        self._masks: dict[tuple[int, int], mx.array | None] = {}

    @classmethod
    def of(cls, layers: Iterable[LayerState], tokens: int) -> Span | None:
        """That of any MLA layer of a state, None if there is none."""
        return next((cls(layer, tokens) for layer in layers if isinstance(layer, LatentCache)), None)

    @property
    def total(self) -> int:
        """Rows of the buffer and new rows."""
        return self.room + self.tokens

    def blocks(self, heads: int) -> list[tuple[int, int]]:
        """Ranges of rows whose scores fit: the whole of it for one query and a cache of ordinary length."""
        step = min(BLOCK_MAX, max(BLOCK_MIN, SCORE_ELEMENTS // (heads * self.tokens)))
        return [(start, min(start + step, self.total)) for start in range(0, self.total, step)]

    def hidden(self, start: int, stop: int) -> mx.array | None:
        """[T, stop - start]: True where a row is empty or comes after the query; None if all are seen."""
        if (start, stop) not in self._masks:
            mask = None
            if stop > self.length and (self.room > self.length or self.tokens > 1):
                columns = mx.arange(start, stop)
                empty = (columns >= self.length) & (columns < self.room)
                mask = empty | (columns - self.room > mx.arange(self.tokens)[:, None])
            self._masks[start, stop] = mask
        return self._masks[start, stop]

    def rows(self, cached: mx.array, new: mx.array, start: int, stop: int) -> mx.array:
        """Rows start to stop of the buffer with the new rows behind it."""
        if start >= self.room:
            return new[start - self.room : stop - self.room]
        if stop <= self.room:
            return cached[start:stop]
        return mx.concatenate([cached[start : self.room], new[: stop - self.room]])


def attend(
    q_nope: mx.array,
    q_ext: mx.array,
    cached: mx.array,
    new: mx.array,
    U: Matrix,
    O: Matrix,
    scale: float,
    span: Span,
) -> mx.array:
    """Causal attention of T new tokens over S0 cached ones and themselves, in the cheaper form.

    q_nope [T, H, n]; q_ext [T, H, e]; cached [S, r+e] the cache's buffer and new [T, r+e], latent then extra part
    of each token; U [H, n, r]; O [H, m, r]; scale multiplies the scores; span says which rows there are.
    Returns [T, H, m] in the dtype of q_nope.
    """
    tokens, _, n = q_nope.shape
    m, r = O.shape[1:]
    e, total = q_ext.shape[-1], span.length + tokens
    expanded = tokens * total * (n + e + m) + total * r * (n + m)
    absorbed = tokens * total * (r + e + r) + tokens * r * (n + m)
    form = attend_absorbed if absorbed <= expanded else attend_expanded
    return form(q_nope, q_ext, cached, new, U, O, scale, span)


def attend_absorbed(
    q_nope: mx.array,
    q_ext: mx.array,
    cached: mx.array,
    new: mx.array,
    U: Matrix,
    O: Matrix,
    scale: float,
    span: Span,
) -> mx.array:
    """`attend` as multi-query attention in the latent space: keys are never expanded."""
    tokens, heads, _ = q_nope.shape
    rank = U.shape[-1]
    q_latent = linear(q_nope.swapaxes(0, 1), U, transpose=False)  # [H, T, r]
    q = mx.concatenate([q_latent, q_ext.swapaxes(0, 1)], axis=-1).astype(mx.float32) * scale
    q = q.reshape(heads * tokens, -1)  # one matrix product serves all heads, which share the keys

    def block(rows: mx.array) -> tuple[mx.array, mx.array]:
        return rows, rows[:, :rank]

    mixed = _softmax_over_blocks(q, cached, new, heads, block, span)  # [H*T, r]
    mixed = mixed.reshape(heads, tokens, rank).astype(q_nope.dtype)
    return linear(mixed, O).swapaxes(0, 1)


def attend_expanded(
    q_nope: mx.array,
    q_ext: mx.array,
    cached: mx.array,
    new: mx.array,
    U: Matrix,
    O: Matrix,
    scale: float,
    span: Span,
) -> mx.array:
    """`attend` with per-head keys and values of one block of tokens at a time."""
    heads, rank = U.shape[0], U.shape[-1]
    q = mx.concatenate([q_nope, q_ext], axis=-1).swapaxes(0, 1).astype(mx.float32) * scale  # [H, T, n+e]
    key_map, value_map = (w if isinstance(w, Quantized) else w.astype(mx.float32) for w in (U, O))

    def block(rows: mx.array) -> tuple[mx.array, mx.array]:
        latent, ext = (
            mx.broadcast_to(part, (heads, *part.shape)) for part in (rows[:, :rank], rows[:, rank:])
        )
        return mx.concatenate([linear(latent, key_map), ext], axis=-1), linear(latent, value_map)

    return _softmax_over_blocks(q, cached, new, heads, block, span).swapaxes(0, 1).astype(q_nope.dtype)


def _softmax_over_blocks(
    q: mx.array,
    cached: mx.array,
    new: mx.array,
    heads: int,
    block: Callable[[mx.array], tuple[mx.array, mx.array]],
    span: Span,
) -> mx.array:
    """Softmax attention with a running maximum over blocks of tokens, so the scores never exist whole.

    q [H, T, w] or [H*T, w], scaled, float32; `block` makes keys [.., S', w] and values [.., S', m] of float32
    rows. The first block holds token 0, which every query sees, so no running maximum is ever -inf.
    """
    past: tuple[mx.array, mx.array, mx.array] | None = None  # sum, its weight, its peak
    for start, stop in span.blocks(heads):
        keys, values = block(span.rows(cached, new, start, stop).astype(mx.float32))
        scores = q @ keys.swapaxes(-1, -2)
        hidden = span.hidden(start, stop)
        if hidden is not None:
            shape = scores.shape
            scores = mx.where(hidden, -mx.inf, scores.reshape(heads, span.tokens, -1)).reshape(shape)
        peak = scores.max(axis=-1, keepdims=True)
        if past is not None:
            peak = mx.maximum(past[2], peak)
        probs = mx.exp(scores - peak)
        mixed, weight = probs @ values, probs.sum(axis=-1, keepdims=True)
        if past is not None:
            carried = mx.exp(past[2] - peak)
            mixed, weight = carried * past[0] + mixed, carried * past[1] + weight
        past = mixed, weight, peak
    assert past is not None
    return past[0] / past[1]
