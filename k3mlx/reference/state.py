"""What a sequence carries from one call to the next, and nothing else.

KDA layers keep convolution windows and the recurrent state, MLA layers the latent cache. A forward
pass returns the next state and leaves the one it was given as it was.
Source: model specification §2.7 and §5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from k3mlx.config import ModelConfig
from k3mlx.errors import UsageError

from .ops import Array


@dataclass(frozen=True)
class KdaState:
    """One KDA layer: windows [3, W-1, P] of q, k, v, oldest row first; state [H, D, D], key channel first."""

    windows: Array
    state: Array


class _Rows:
    """A growing buffer of rows shared by caches of different lengths; `used` is the longest of them."""

    def __init__(self, rows: Array) -> None:
        self.rows = rows
        self.used = 0


@dataclass(frozen=True)
class LatentCache:
    """One MLA layer: the first `length` rows [r+e] of a buffer, latent then extra part of each token.

    Appending returns a longer cache. Rows that another cache can see are never overwritten: whoever
    appends to a cache that is not the longest of its buffer gets a buffer of its own.
    """

    buffer: _Rows
    length: int

    @classmethod
    def empty(cls, width: int, dtype: np.dtype) -> LatentCache:
        return cls(_Rows(np.empty((0, width), dtype)), 0)

    def rows(self) -> Array:
        return self.buffer.rows[: self.length]

    def append(self, new: Array, fill: Callable[[Array, Array], None] = np.copyto) -> LatentCache:
        """The cache with rows [T, r+e] behind it, which `fill` puts into the room that it is given for them."""
        buffer, length = self.buffer, self.length + len(new)
        if buffer.used != self.length or length > len(buffer.rows):
            capacity = max(256, length + length // 2)
            buffer = _Rows(np.empty((capacity, new.shape[1]), new.dtype))
            buffer.rows[: self.length] = self.rows()
        fill(buffer.rows[self.length : length], new)
        buffer.used = length
        return LatentCache(buffer, length)


LayerState = KdaState | LatentCache


@dataclass(frozen=True)
class State:
    """The state of one sequence: a value, so a snapshot is a reference and a restore an assignment."""

    layers: tuple[LayerState, ...]
    length: int = 0

    @classmethod
    def empty(cls, config: ModelConfig, dtype: np.dtype) -> State:
        """The state before the first token: zero windows, zero KDA state, no latents."""
        heads, width = config.kda_num_heads, config.kda_head_dim
        kda = KdaState(
            np.zeros((3, config.short_conv_kernel_size - 1, config.kda_projection), dtype),
            np.zeros((heads, width, width), dtype),
        )
        mla = LatentCache.empty(config.kv_lora_rank + config.qk_rope_head_dim, dtype)
        return cls(tuple(kda if kind == "kda" else mla for kind in config.layer_kinds))

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

    def arrays(self) -> dict[str, Array]:
        """Every array of the state by name: `0.windows`, `0.state`, `3.latents` and so on."""
        named: dict[str, Array] = {}
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LatentCache):
                named[f"{number}.latents"] = layer.rows()
            else:
                named |= {f"{number}.windows": layer.windows, f"{number}.state": layer.state}
        return named

    @classmethod
    def from_arrays(
        cls, config: ModelConfig, dtype: np.dtype, arrays: dict[str, Array], length: int
    ) -> State:
        """The state after `length` tokens whose `arrays()` these are.

        Raises UsageError if names, shapes or dtypes are not those of this model.
        """
        empty = cls.empty(config, dtype)
        expected = {
            name: (length, array.shape[1]) if name.endswith(".latents") else array.shape
            for name, array in empty.arrays().items()
        }
        if {name: array.shape for name, array in arrays.items()} != expected or any(
            array.dtype != dtype for array in arrays.values()
        ):
            raise UsageError(
                "the saved state does not fit this model, backend and dtype; start a new session"
            )
        layers = tuple(
            layer.append(arrays[f"{number}.latents"])
            if isinstance(layer, LatentCache)
            else KdaState(arrays[f"{number}.windows"], arrays[f"{number}.state"])
            for number, layer in enumerate(empty.layers)
        )
        return cls(layers, length)
