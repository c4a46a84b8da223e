"""Room for weights that are read again and again, in memory that a process has had before: pages that it must be
given anew cost more than reading into them.

Owns which bytes of one region are in use. Not the region: that is an array of the caller's.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from typing import NamedTuple

GRAIN = 64  # places start at multiples of this, enough for any number and for vector units


class Place(NamedTuple):
    """Bytes start to stop of a region."""

    start: int
    stop: int


class Arena:
    """The free places of a region of `size` bytes: the first that is large enough is given, neighbours merge.

    Layers that are taken and given back in turn go round it, so it does not splinter. May be called from any thread.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [Place(0, size)] if size else []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Place | None:
        """At least `nbytes` bytes, or None when there is no place for them in one piece."""
        wanted = padded(nbytes)
        with self._lock:
            for at, (start, stop) in enumerate(self._free):
                if stop - start >= wanted:
                    self._free[at : at + 1] = [Place(start + wanted, stop)] if stop - start > wanted else []
                    return Place(start, start + wanted)
        return None

    def give(self, places: Iterable[Place]) -> None:
        """Take back what `take` has given."""
        with self._lock:
            for place in places:
                bisect.insort(self._free, place)
            merged = self._free[:1]
            for start, stop in self._free[1:]:
                if start == merged[-1].stop:
                    merged[-1] = Place(merged[-1].start, stop)
                else:
                    merged.append(Place(start, stop))
            self._free = merged


def padded(nbytes: int) -> int:
    """What an array of so many bytes takes of a region."""
    return max(1, -(-nbytes // GRAIN)) * GRAIN


def enough(layers: Iterable[Iterable[int]], at_once: int) -> int:
    """Bytes of a region for the arrays of any `at_once` of these layers, each given as its arrays' sizes.

    Gaps between layers that are in use may add up to an array more.
    """
    rooms = [list(map(padded, sizes)) for sizes in layers]
    return sum(sorted(map(sum, rooms))[-at_once:]) + max(map(max, rooms), default=0)
