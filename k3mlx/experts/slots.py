"""Memory that holds one expert: aligned, allocated once, refilled from disk, given back under pressure.

A slot is a mapping of its own and not a piece of one large region, so that giving it back returns its
pages to the system. MLX supplies slots through the same interface, from arrays that it owns.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ALIGN = 4096  # direct reads start and end at multiples of this, in the file and in memory


@dataclass(frozen=True, eq=False)
class SlotMemory:
    """The bytes of one slot: a writable array that starts at a multiple of ALIGN.

    `owner` is the array of another library that the bytes belong to, if any, and `start` the index of
    `bytes[0]` in it: `owner[start + a : start + b]` is `bytes[a:b]`.
    """

    bytes: NDArray[np.uint8]
    owner: Any = None
    start: int = 0


class SlotProvider(Protocol):
    """Where slots come from. Called by one thread at a time, with no lock that the caller could need."""

    def allocate(self, nbytes: int) -> SlotMemory:
        """A slot of at least `nbytes` bytes. Raises MemoryError when there is none."""

    def release(self, memory: SlotMemory) -> None:
        """Take a slot back that nobody reads or fills any more."""


class NumpySlots:
    """Slots in anonymous memory of this process; pages count only once they have been filled."""

    def allocate(self, nbytes: int) -> SlotMemory:
        try:
            return SlotMemory(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8))
        except OSError as error:
            raise MemoryError(f"no memory for a slot of {nbytes} bytes ({error.strerror})") from None

    def release(self, memory: SlotMemory) -> None:
        """Nothing to do: the mapping ends with its last view."""


def aligned_view(array: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
    """The part of a flat byte array from its first multiple of ALIGN on, and where that is.

    For providers whose allocations are not aligned: allocate ALIGN more and cut.
    """
    start = -array.ctypes.data % ALIGN
    return array[start:], start


def round_up(size: int) -> int:
    """The next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN
