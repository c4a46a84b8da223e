"""The experts of one layer on their way to whoever computes with them.

Owns the order in which they are handed out, how long they are held, and reading ahead within the layer.
The slots and the reads are the store's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from k3mlx.errors import ResourceError

from .entry import READING, READY
from .reads import DEMAND

if TYPE_CHECKING:
    from .entry import Entry, Held
    from .store import ExpertStore


class Request:
    """Distinct experts of one layer, from `ExpertStore.request`. Iterated once, by the thread that asked."""

    def __init__(self, store: ExpertStore, layer: int, experts: list[int], in_order: bool) -> None:
        self._store = store
        self._layer = layer
        self._experts = experts
        self._in_order = in_order
        self._left = set(range(len(experts)))  # positions not handed out
        self._entries: dict[int, Entry] = {}  # position -> its slot, from admission until it is handed out
        self._pending: list[int] = []  # heap of positions without a slot
        self._held: deque[list[Entry]] = deque()
        with store.lock:
            store.trim()
            for position, expert in enumerate(experts):
                entry = store.find((layer, expert))
                if entry is None:
                    self._pending.append(position)
                else:
                    self._take(position, entry)
            store.ahead.settle(layer)
            if store.options.pipe:
                self._pump()

    def __len__(self) -> int:
        """How many experts were asked for."""
        return len(self._experts)

    @property
    def here(self) -> bool:
        """Whether all of them are in memory now."""
        with self._store.lock:
            return not self._pending and all(entry.state == READY for entry in self._entries.values())

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def groups(self, at_most: int = 1, whole: bool = False, keep: int = 0) -> Iterator[list[Held]]:
        """Yield experts, up to `at_most` at a time; all of a group are held until the next is asked for.

        How many come at once depends on what has been read, unless `whole` makes every group but the last
        full. With `keep`, that many earlier groups stay held too, for work that ends later. Raises
        ModelFilesError when a read has failed, ResourceError when the cache cannot hold that many.
        """
        if whole and at_most * (keep + 1) > max(self._store.capacity, self._store.minimum):
            raise ResourceError(
                f"{at_most * (keep + 1)} experts are to be held at once, the cache has room for"
                f" {self._store.capacity}"
            )
        while self._left:
            self._release(keep)
            yield [entry.held for entry in self._next(at_most, whole)]
        self._release(0)

    def close(self) -> None:
        """Take back what is held and no longer want the rest. Reads in progress end in the cache."""
        self._release(0)
        with self._store.lock:
            for entry in self._entries.values():
                entry.wanted -= 1
            self._entries.clear()
            self._pending.clear()
            self._left.clear()

    def _release(self, keep: int) -> None:
        with self._store.lock:
            while len(self._held) > keep:
                for entry in self._held.popleft():
                    entry.holds -= 1
            self._store.trim()

    def _next(self, at_most: int, whole: bool) -> list[Entry]:
        store = self._store
        with store.lock:
            while True:
                if store.options.pipe:
                    self._pump()
                positions = self._available(at_most, whole)
                if positions:
                    break
                if not store.reading:  # waiting would not help
                    if store.options.pipe or not self._pump():
                        self._free_a_slot()
                    continue
                started = perf_counter()
                store.lock.wait()
                store.counters.wait_seconds += perf_counter() - started
            group = [self._entries.pop(position) for position in positions]
            for entry in group:
                entry.wanted -= 1
                entry.holds += 1
            self._left.difference_update(positions)
            self._held.append(group)
            return group

    def _take(self, position: int, entry: Entry) -> None:
        entry.wanted += 1
        self._entries[position] = entry

    def _pump(self) -> bool:
        """Give slots to as many waiting positions as there are slots for, the first ones first; any given?"""
        waiting = len(self._pending)
        while self._pending:
            key = self._layer, self._experts[self._pending[0]]
            entry = self._store.admit(key, DEMAND)
            if entry is None:
                break
            self._take(heapq.heappop(self._pending), entry)
        else:
            self._store.pump_warm()
        return len(self._pending) < waiting

    def _available(self, at_most: int, whole: bool) -> list[int]:
        """Positions that can be handed out now; raises the error of a read that has failed."""
        candidates = sorted(self._left) if self._in_order else list(self._entries)
        found: list[int] = []
        for position in candidates[:at_most] if self._in_order else candidates:
            entry = self._entries.get(position)
            if entry is not None and entry.error is not None:
                raise entry.error
            if entry is not None and entry.state == READY:
                found.append(position)
            elif self._in_order:
                break
        if not self._store.options.pipe and any(e.state == READING for e in self._entries.values()):
            return []
        if whole and len(found) < min(at_most, len(self._left)):
            return []
        return found[:at_most]

    def _free_a_slot(self) -> None:
        """Every slot holds an expert that this request wants later: give up the one wanted last."""
        later = [
            position
            for position, entry in self._entries.items()
            if entry.state == READY and entry.wanted == 1 and not entry.holds
        ]
        first = self._pending[0] if self._pending else None
        if first is None or not later or max(later) < first:
            raise ResourceError(
                f"layer {self._layer}: all {self._store.capacity} slots of the expert cache are in use;"
                " give it more memory"
            )
        position = max(later)
        self._store.steal(self._entries.pop(position))
        heapq.heappush(self._pending, position)
