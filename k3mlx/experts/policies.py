"""Which expert to drop when a slot is needed: least recently used, decayed frequency, S3-FIFO.

A policy keeps the order of what is resident and nothing else: no bytes, no locks, no clock but the
sequence of calls. The store and `scripts/replay_cache.py` use the same objects.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from k3mlx.errors import UsageError

Key = tuple[int, int]  # layer, expert
Evictable = Callable[[Key], bool]


class Policy(Protocol):
    """The order of eviction among resident experts."""

    name: str

    def insert(self, key: Key) -> None:
        """`key` becomes resident."""

    def touch(self, key: Key) -> None:
        """A resident `key` is used."""

    def demote(self, key: Key) -> None:
        """A resident `key` turned out not to be needed: drop it before any other."""

    def remove(self, key: Key) -> None:
        """`key` is no longer resident."""

    def victim(self, evictable: Evictable) -> Key | None:
        """The resident key to drop first among those that may be dropped; it stays until `remove`."""

    def residents(self) -> list[Key]:
        """Every resident key, the most valuable first."""


class Lru:
    """Least recently used first."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key) -> None:
        self._order[key] = None

    def touch(self, key: Key) -> None:
        self._order.move_to_end(key)

    def demote(self, key: Key) -> None:
        self._order.move_to_end(key, last=False)

    def remove(self, key: Key) -> None:
        del self._order[key]

    def victim(self, evictable: Evictable) -> Key | None:
        return next(filter(evictable, self._order), None)

    def residents(self) -> list[Key]:
        return list(reversed(self._order))


class DecayedFrequency:
    """Lowest sum of past uses first, each use halved in weight for every `half_life` uses since.

    The half-life is in uses of the whole cache, a quarter of its capacity unless given: much shorter is LRU, much
    longer keeps what was popular once. The sum F at time t is kept as log2 F + t / half_life, which orders
    keys at any time.
    """

    name = "decayed"

    def __init__(self, capacity: int, half_life: float | None = None) -> None:
        self._rate = 1 / (half_life or max(1, capacity / 4))
        self._uses = itertools.count()
        self._order = itertools.count()
        self._score: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._past: OrderedDict[Key, float] = OrderedDict()  # scores of what was dropped lately
        self._past_max = max(16, 2 * capacity)

    def insert(self, key: Key) -> None:
        self._use(key, self._past.pop(key, -math.inf))

    def touch(self, key: Key) -> None:
        self._use(key, self._score[key])

    def demote(self, key: Key) -> None:
        self._set(key, -math.inf)

    def remove(self, key: Key) -> None:
        self._past[key] = self._score.pop(key)
        if len(self._past) > self._past_max:
            self._past.popitem(last=False)

    def victim(self, evictable: Evictable) -> Key | None:
        kept = []
        found = None
        while self._heap:
            score, _, key = self._heap[0]
            if self._score.get(key) == score:
                if evictable(key):
                    found = key
                    break
                kept.append(self._heap[0])
            heapq.heappop(self._heap)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found

    def residents(self) -> list[Key]:
        return sorted(self._score, key=self._score.__getitem__, reverse=True)

    def _use(self, key: Key, score: float) -> None:
        now = next(self._uses) * self._rate
        high, low = max(score, now), min(score, now)
        self._set(key, high + math.log2(1 + 2.0 ** (low - high)))

    def _set(self, key: Key, score: float) -> None:
        self._score[key] = score
        heapq.heappush(self._heap, (score, next(self._order), key))
        if len(self._heap) > 64 + 8 * len(self._score):
            self._heap = [entry for entry in self._heap if self._score.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)


class S3Fifo:
    """Three queues: newcomers prove themselves in a small one, the used go on to the main one.

    A ghost queue remembers keys dropped from the small queue; one that returns goes to the main queue at once.
    """

    name = "s3fifo"
    _FREQUENCY_MAX = 3

    def __init__(self, capacity: int, small_share: float = 0.1) -> None:
        self._small_target = max(1, int(capacity * small_share))
        self._ghost_max = max(1, capacity - self._small_target)
        self._small: OrderedDict[Key, int] = OrderedDict()  # key -> uses since it came, at most 3
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghost: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key) -> None:
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, key: Key) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, self._FREQUENCY_MAX)

    def demote(self, key: Key) -> None:
        self._main.pop(key, None)
        self._small[key] = 0
        self._small.move_to_end(key, last=False)

    def remove(self, key: Key) -> None:
        if key in self._small:
            del self._small[key]
            self._ghost[key] = None
            if len(self._ghost) > self._ghost_max:
                self._ghost.popitem(last=False)
        else:
            del self._main[key]

    def victim(self, evictable: Evictable) -> Key | None:
        if len(self._small) >= self._small_target:
            found = self._from_small(evictable)
            if found is not None:
                return found
        found = self._from_main(evictable)
        return found if found is not None else self._from_small(evictable)

    def residents(self) -> list[Key]:
        return [*reversed(self._main), *reversed(self._small)]

    def _from_small(self, evictable: Evictable) -> Key | None:
        for key in list(self._small):
            if self._small[key] > 0:
                del self._small[key]
                self._main[key] = 0
            elif evictable(key):
                return key
        return None

    def _from_main(self, evictable: Evictable) -> Key | None:
        for _ in range(self._FREQUENCY_MAX + 1):
            for key in list(self._main):
                if not evictable(key):
                    continue
                if self._main[key] == 0:
                    return key
                self._main[key] -= 1
                self._main.move_to_end(key)
        return None


POLICIES: dict[str, Callable[[int], Policy]] = {p.name: p for p in (Lru, DecayedFrequency, S3Fifo)}
DEFAULT_POLICY = "lru"


def make_policy(name: str, capacity: int) -> Policy:
    """The policy of that name for a cache of `capacity` experts. Raises UsageError for an unknown name."""
    if name not in POLICIES:
        raise UsageError(f"cache policy is {name!r}, expected one of {', '.join(POLICIES)}")
    return POLICIES[name](capacity)


def belady_misses(trace: Iterable[Key], capacity: int) -> int:
    """How often an optimal cache of `capacity` experts, which knows the future, would miss."""
    accesses = list(trace)
    following: deque[int] = deque()
    last: dict[Key, int] = {}
    for time in range(len(accesses) - 1, -1, -1):
        following.appendleft(last.get(accesses[time], len(accesses)))
        last[accesses[time]] = time
    next_use: dict[Key, int] = {}
    heap: list[tuple[int, Key]] = []  # resident keys by falling next use; outdated entries are skipped
    misses = 0
    for key, upcoming in zip(accesses, following, strict=True):
        if key not in next_use:
            misses += 1
            if len(next_use) >= capacity:
                while next_use.get(heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                del next_use[heapq.heappop(heap)[1]]
        next_use[key] = upcoming
        heapq.heappush(heap, (-upcoming, key))
    return misses
