"""Experts that are read before anybody has asked for them: which, and what becomes of them.

Owns those read on a guess about a layer to come, from their admission until the layer's own request has begun, and
what may be taken back from guesses and the warm start for a demand. Makes no guess itself (`lookahead.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .entry import READING, READY, Entry
from .policies import Key
from .reads import LOOKAHEAD

if TYPE_CHECKING:
    from .store import ExpertStore


class Speculation:
    """What a store has read ahead. Every call is under the store's lock."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._keys: dict[int, list[Key]] = {}  # by layer, until it is settled: nothing to do for most layers

    def begin(self, layer: int, experts: Sequence[int]) -> None:
        """Admit the experts that are not there yet, the most likely first, while there is a slot to spare."""
        for rank, expert in enumerate(experts):
            key = layer, int(expert)
            if key in self._store.entries:
                continue
            if self._store.admit(key, LOOKAHEAD, rank) is None:
                return
            self._keys.setdefault(layer, []).append(key)

    def came_true(self, entry: Entry) -> None:
        """An expert that was read ahead is wanted."""
        entry.speculative = False
        self._store.counters.prefetch_useful_bytes += self._store.payload

    def settle(self, layer: int) -> None:
        """Give up what was read ahead for a layer and turned out not to be needed (its request has begun)."""
        for key in self._keys.pop(layer, ()):
            entry = self._store.entries.get(key)
            if entry is not None and entry.speculative and not entry.wanted:
                self.abandon(entry)

    def abandon(self, entry: Entry) -> None:
        """Let go of an expert that was read ahead in vain, whatever the state of its read."""
        if entry.state == READING and entry.job is not None:
            if self._store.pool.cancel(entry.job):
                self._store.drop_unread(entry)
            return  # a read that runs ends soon and comes here again
        self._store.counters.prefetch_wasted_bytes += self._store.payload
        entry.speculative = False
        self._store.policy.demote(entry.key)

    def give_up_one(self) -> None:
        """Free a slot that was taken in advance, by a guess or the warm start, for a demand."""
        for entry in self._store.entries.values():
            if entry.wanted or entry.holds:
                continue
            if entry.state == READY:  # read ahead, else it would have been a victim
                self._store.evict(entry)
                return
            if entry.job is not None and self._store.pool.cancel(entry.job):
                self._store.drop_unread(entry)
                return
