"""Memory of MLX for layers that are read again and again: lent to a layer, and used again once nothing can need it.

Facts on lifetime: what was built on a layer may not have been evaluated when the next one is asked for; it has been
when an evaluation of the stream that was built later has been waited for. So a layer that was dropped rests until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.dense_memory import Arena, Place

HOST = {mx.bfloat16: np.uint16, mx.float32: np.float32, mx.uint32: np.uint32, mx.uint8: np.uint8}
_WORD = 8
_BLOCK = 1 << 33  # bytes of one array: its length must fit 31 bits


class Region:
    """`size` bytes, lent in arrays. `evaluations` counts those that have been waited for.

    Called by the thread that owns MLX.
    """

    def __init__(self, size: int, evaluations: Callable[[], int]) -> None:
        starts = range(0, size, _BLOCK)
        self._blocks = [_Block(min(_BLOCK, size - start)) for start in starts]
        self._evaluations = evaluations
        self._lent: dict[int, list[tuple[_Block, Place]]] = {}
        self._reserved: list[tuple[_Block, Place] | None] = []
        self._resting: list[tuple[int, list[tuple[_Block, Place]]]] = []

    def reserve(self, layer: int, sizes: Sequence[int]) -> None:
        """Find room for a layer's arrays, of so many bytes each, the largest first: small ones fit the gaps."""
        self._wake()
        found = {
            at: self._take(sizes[at]) for at in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        }
        self._reserved = [found[at] for at in range(len(sizes))][::-1]
        self._lent.setdefault(layer, []).extend(taken for taken in found.values() if taken is not None)

    def lend(self, shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, NDArray] | None:
        """The next of the arrays reserved, until `drop` of their layer, and the host's view of it; None if there was
        no room."""
        taken = self._reserved.pop()
        return None if taken is None else taken[0].array(taken[1], shape, dtype)

    def drop(self, layer: int) -> None:
        """Nothing will be built on this layer's arrays any more."""
        lent = self._lent.pop(layer, None)
        if lent:
            self._resting.append((self._evaluations(), lent))

    def _take(self, nbytes: int) -> tuple[_Block, Place] | None:
        for block in self._blocks:
            place = block.arena.take(nbytes)
            if place is not None:
                return block, place
        return None

    def _wake(self) -> None:
        done = self._evaluations()
        for count, lent in self._resting:
            if count < done:
                for block, place in lent:
                    block.arena.give([place])
        self._resting = [rest for rest in self._resting if rest[0] >= done]


class _Block:
    """One array of words, whose parts are seen as others; never assigned to, so that the views stay."""

    def __init__(self, size: int) -> None:
        self.arena = Arena(size)
        self._owner = mx.zeros(size // _WORD, mx.uint64)
        mx.eval(self._owner)
        self._host = np.array(self._owner, copy=False)

    def array(self, place: Place, shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, NDArray]:
        part, count = slice(place.start // _WORD, place.stop // _WORD), math.prod(shape)
        array = self._owner[part].view(dtype)[:count].reshape(shape)
        mx.eval(array)  # a view: nothing is copied
        return array, self._host[part].view(HOST[dtype])[:count].reshape(shape)
