"""What a sequence carries from one call to the next on the MLX backend, and how a step is committed.

A step gives new KDA states and new latent rows and writes nothing. `State.commit`, called once the step has
been evaluated, replaces the KDA states and writes the rows, in an evaluation of its own. States are values:
one that has been continued can be continued again. Source: model specification §2.7 and §5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from k3mlx.config import ModelConfig
from k3mlx.errors import UsageError

GROWTH = 256  # a latent buffer grows by an eighth, in multiples of this many rows


@dataclass(frozen=True)
class KdaState:
    """One KDA layer: windows [1, 3, W-1, P] of q, k, v, oldest row first, in the activation dtype; state
    [1, H, D, D] float32, key channel first. The leading axis is the kernels' batch."""

    windows: mx.array
    state: mx.array


class _Rows:
    """A growing buffer of rows shared by caches of different lengths; `used` is the longest of them."""

    def __init__(self, rows: mx.array, used: int = 0) -> None:
        self.rows = rows
        self.used = used

    def write(self, start: int, new: mx.array) -> None:
        """Put `new` behind row `start`. No other reference to the old array is left when this is evaluated, so
        MLX writes in its memory instead of copying the buffer."""
        self.rows = mx.slice_update(self.rows, new, mx.array([start, 0]), (0, 1))
        self.used = start + new.shape[0]


@dataclass(frozen=True)
class LatentCache:
    """One MLA layer: the first `length` rows [r+e] of a buffer, latent then extra part of each token.

    Rows that another cache can see are never overwritten: whoever appends to a cache that is not the
    longest of its buffer gets a buffer of its own.
    """

    buffer: _Rows
    length: int

    @classmethod
    def empty(cls, width: int, dtype: mx.Dtype) -> LatentCache:
        return cls(_Rows(mx.zeros((0, width), dtype)), 0)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.buffer.rows.shape[1]

    def rows(self) -> mx.array:
        """[length, r+e]; shares the buffer's memory."""
        return self.buffer.rows[: self.length]

    def room(self) -> int:
        """Rows of the buffer from its start that contain those of this cache, a multiple of GROWTH."""
        return min(round_up(self.length), self.buffer.rows.shape[0])

    def append(self, new: mx.array) -> LatentCache:
        """A cache with evaluated rows `new` [T, r+e] behind; nothing is written before it is evaluated."""
        buffer, length = self.buffer, self.length + new.shape[0]
        if buffer.used != self.length or length > buffer.rows.shape[0]:
            capacity = round_up(length + length // 8)
            space = mx.zeros((capacity - length, new.shape[1]), new.dtype)
            buffer = _Rows(mx.concatenate([self.rows(), new, space]), length)
        else:
            buffer.write(self.length, new)
        return LatentCache(buffer, length)


def round_up(rows: int) -> int:
    """The next multiple of GROWTH."""
    return -(-rows // GROWTH) * GROWTH


LayerState = KdaState | LatentCache
# what a step gives for a layer: its new state, or new latent rows [T, r+e]
Update: TypeAlias = "KdaState | mx.array"


@dataclass(frozen=True)
class State:
    """The state of one sequence; a snapshot is a reference and a restore an assignment.

    number: by which other ranks know their parts of it (`k3mlx.ranks.split`); 0 is the empty state.
    """

    layers: tuple[LayerState, ...]
    length: int = 0
    number: int = 0

    @classmethod
    def empty(cls, config: ModelConfig, dtype: mx.Dtype) -> State:
        """The state before the first token: zero windows, zero KDA state, no latents."""
        heads, width = config.kda_num_heads, config.kda_head_dim
        kda = KdaState(
            mx.zeros((1, 3, config.short_conv_kernel_size - 1, config.kda_projection), dtype),
            mx.zeros((1, heads, width, width), mx.float32),
        )
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return cls(
            tuple(kda if kind == "kda" else LatentCache.empty(width, dtype) for kind in config.layer_kinds)
        )

    def commit(self, updates: Sequence[Update], tokens: int) -> State:
        """The state after `tokens` more; the updates are evaluated arrays."""
        layers = [advance(old, update) for old, update in zip(self.layers, updates, strict=True)]
        caches = [layer for layer in layers if isinstance(layer, LatentCache)]
        mx.eval([cache.buffer.rows for cache in caches])
        if any(round_up(cache.length) > round_up(self.length) for cache in caches):
            mx.clear_cache()  # what is kept for reuse has sizes that do not come again
        return State(tuple(layers), self.length + tokens)

    def memory(self) -> dict[int, int]:
        """Bytes that this state keeps alive, by buffer (at its capacity): states share some of them."""
        sizes: dict[int, int] = {}
        for layer in self.layers:
            if isinstance(layer, LatentCache):
                sizes[id(layer.buffer)] = layer.buffer.rows.nbytes
            else:
                sizes[id(layer.windows)], sizes[id(layer.state)] = layer.windows.nbytes, layer.state.nbytes
        return sizes

    @property
    def nbytes(self) -> int:
        """All of `memory`."""
        return sum(self.memory().values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array of the state by name, widened to float32: `0.windows` [3, W-1, P], `0.state` [H, D, D],
        `3.latents` [length, r+e], as the reference names them."""
        named: dict[str, np.ndarray] = {}
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LatentCache):
                named[f"{number}.latents"] = _to_numpy(layer.rows())
            else:
                named[f"{number}.windows"] = _to_numpy(layer.windows)[0]
                named[f"{number}.state"] = _to_numpy(layer.state)[0]
        return named

    @classmethod
    def from_arrays(
        cls, config: ModelConfig, dtype: mx.Dtype, arrays: dict[str, np.ndarray], length: int
    ) -> State:
        """The state after `length` tokens whose `arrays()` these are.

        Raises UsageError if names or shapes are not those of this model.
        """
        check_arrays(config, arrays, length)
        empty = cls.empty(config, dtype)
        updates: list[Update] = []
        for number, layer in enumerate(empty.layers):
            if isinstance(layer, LatentCache):
                updates.append(mx.array(arrays[f"{number}.latents"]).astype(dtype))
            else:
                windows = mx.array(arrays[f"{number}.windows"])[None].astype(dtype)
                updates.append(KdaState(windows, mx.array(arrays[f"{number}.state"])[None]))
        mx.eval([[u.windows, u.state] if isinstance(u, KdaState) else u for u in updates])
        return empty.commit(updates, length)


def array_shapes(config: ModelConfig, length: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `State.arrays` after `length` tokens."""
    heads, width = config.kda_num_heads, config.kda_head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for number, kind in enumerate(config.layer_kinds):
        if kind == "kda":
            shapes[f"{number}.windows"] = 3, config.short_conv_kernel_size - 1, config.kda_projection
            shapes[f"{number}.state"] = heads, width, width
        else:
            shapes[f"{number}.latents"] = length, config.kv_lora_rank + config.qk_rope_head_dim
    return shapes


def check_arrays(config: ModelConfig, arrays: Mapping[str, np.ndarray], length: int) -> None:
    """Raise UsageError if names or shapes are not those of this model's state after `length` tokens."""
    if {name: array.shape for name, array in arrays.items()} != array_shapes(config, length):
        raise UsageError("the saved state does not fit this model, backend and dtype; start a new session")


def advance(old: LayerState, update: Update) -> LayerState:
    """The state of a layer after a step; the update holds evaluated arrays."""
    if isinstance(old, LatentCache):
        assert isinstance(update, mx.array)
        return old.append(update)
    assert isinstance(update, KdaState)
    return update


def _to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))
