"""Dense weights split over ranks, as rank 0 sees it: what goes out, how parts become a whole, whose state is where.

A rank's state after a step has a number, which rank 0's `State` carries; when that is gone, the others are told.
Sums are in the order of ranks, in float32. Source of what is added: model specification §2.3, §2.5, §2.6.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.config import ModelConfig
from k3mlx.model.state import State, array_shapes, check_arrays

from .exchange import Evaluate, Floats, pack
from .lead import Arrays, Lead, Total, Whole, add
from .part import Part, divide
from .team import Team


class SplitLead(Lead):
    """Rank 0 of several whose dense weights are split."""

    def __init__(self, team: Team, part: Part, config: ModelConfig) -> None:
        super().__init__(team)
        self.part: Part = part
        self._config = config
        self._numbers = 0
        self._gone: deque[int] = deque()

    def begin(self, state: State, tokens: int) -> None:
        self.team.tell({"op": "step", "number": state.number, "tokens": tokens, "gone": self._take_gone()})

    def keep(self, state: State) -> State:
        self._numbers += 1
        kept = replace(state, number=self._numbers)
        weakref.finalize(kept, self._gone.append, kept.number).atexit = False
        self.team.tell({"op": "keep", "number": kept.number})
        return kept

    @contextmanager
    def share(self, what: str, layer: int, x: mx.array, evaluate: Evaluate) -> Iterator[Whole]:
        message = {"op": what, "layer": layer, "tokens": x.shape[0]}
        parts = [divide(self._config.vocab_size, rank, self.team.size) for rank in range(self.team.size)]
        widths = list(map(len, parts))
        width = widths[0] if what == "head" else x.shape[-1]
        with self._round(message, on_host(x, evaluate), width, evaluate) as answer:

            def whole(mine: mx.array) -> mx.array:
                everybody = answer(widened(on_host(mine, evaluate), width))
                if what == "head":
                    slices = [part[:, :n] for part, n in zip(everybody, widths, strict=True)]
                    return mx.array(np.concatenate(slices, axis=1))
                return mx.array(add(everybody)).astype(mine.dtype)

            yield whole

    @contextmanager
    def spread(
        self,
        layer: int,
        latent: mx.array,
        ids: NDArray[np.intp],
        weights: Floats,
        x: mx.array,
        evaluate: Evaluate,
    ) -> Iterator[Total]:
        message = {"op": "layer", "layer": layer, "tokens": len(ids)}
        out = np.concatenate([pack(np.array(latent), ids, weights), on_host(x, evaluate)], axis=1)
        routed, width = latent.shape[-1], latent.shape[-1] + x.shape[-1]
        with self._round(message, out, width, evaluate) as answer:

            def total(mine: Floats, shared: mx.array) -> tuple[Floats, mx.array]:
                summed = add(answer(np.concatenate([mine, on_host(shared, evaluate)], axis=1)))
                return summed[:, :routed], mx.array(summed[:, routed:]).astype(shared.dtype)

            yield total

    def gather(self, state: State, arrays: Arrays) -> Arrays:
        self.team.tell({"op": "gather", "number": state.number})
        size, config, whole = self.team.size, self._config, dict(arrays)
        counts = [len(divide(config.kda_num_heads, rank, size)) for rank in range(size)]
        for name in split_names(arrays):
            rows = by_head(name, arrays[name], self.part.config)
            everybody = self._exchange.end(self._exchange.begin(lengthened(rows, counts[0])), self.wait)
            heads = np.concatenate([part[:n] for part, n in zip(everybody, counts, strict=True)])
            whole[name] = from_heads(name, heads, config)
        return whole

    def scatter(self, arrays: Arrays, length: int) -> Arrays:
        check_arrays(self._config, arrays, length)
        self.team.tell({"op": "scatter", "length": length})
        own = {}
        for name in array_shapes(self._config, length):
            out = given(name, arrays[name], self._config)
            self._exchange.end(self._exchange.begin(out), self.wait)
            own[name] = taken(name, out, self.part)
        return own

    def _take_gone(self) -> list[int]:
        return [self._gone.popleft() for _ in range(len(self._gone))]


def on_host(x: mx.array, evaluate: Evaluate) -> Floats:
    """x in float32, evaluated."""
    wide = x.astype(mx.float32)
    evaluate([wide])
    return np.array(wide)


def widened(rows: Floats, width: int) -> Floats:
    """[T, n] with zeros behind, to [T, width]."""
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def lengthened(rows: Floats, count: int) -> Floats:
    """[n, m] with zeros below, to [count, m]."""
    return np.pad(rows, ((0, count - len(rows)), (0, 0)))


def split_names(arrays: Arrays) -> list[str]:
    """Those arrays of a state that are divided by heads: windows and states of KDA."""
    return [name for name in arrays if not name.endswith(".latents")]


def by_head(name: str, array: Floats, config: ModelConfig) -> Floats:
    """A state [H, D, D], or windows [3, W-1, H*D], as [H, n]."""
    heads, width, taps = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size - 1
    if not name.endswith(".windows"):
        return array.reshape(heads, width * width)
    array = array.reshape(3, taps, heads, width).transpose(2, 0, 1, 3)
    return np.ascontiguousarray(array).reshape(heads, 3 * taps * width)


def from_heads(name: str, rows: Floats, config: ModelConfig) -> Floats:
    """What `by_head` was given; rows [H, n] of any number of heads."""
    heads, width, taps = len(rows), config.kda_head_dim, config.short_conv_kernel_size - 1
    if not name.endswith(".windows"):
        return rows.reshape(heads, width, width)
    return rows.reshape(heads, 3, taps, width).transpose(1, 2, 0, 3).reshape(3, taps, heads * width)


def given(name: str, array: Floats, config: ModelConfig) -> Floats:
    """An array of a whole state as it goes to all ranks."""
    return array if name.endswith(".latents") else by_head(name, array, config)


def taken(name: str, out: Floats, part: Part) -> Floats:
    """A rank's part of what `given` made."""
    if name.endswith(".latents"):
        return out
    heads = part.heads["kda"]
    return from_heads(name, out[heads.start : heads.stop], part.config)
