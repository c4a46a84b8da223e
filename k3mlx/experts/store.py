"""Routed experts on demand: a cache of slots within a budget, filled by reading threads.

Bytes are kept as stored, so nothing here can change a result. Owns which slot holds which expert and
who uses it; policies, files, threads and what is read ahead are in their own modules. Knows nothing of
routing, and computes nothing. One thread asks, any number read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.errors import ResourceError

from .entry import FAILED, READY, Entry, Held
from .files import ExpertFiles, ReadGivenUp, direct_supported, find_copies
from .filling import fill
from .layout import ExpertLayout
from .lookahead import Lookahead
from .options import StreamOptions
from .policies import Key, make_policy
from .probe import DirectChoice, choose_direct
from .reads import DEMAND, WARM, Job, ReadPool
from .request import Request
from .slots import NumpySlots, SlotMemory, SlotProvider
from .speculation import Speculation
from .trace import TraceWriter
from .warm import load_residency, residency_path, save_residency

WARM_MIN_BYTES = 1 << 30  # of experts in a model; a smaller one is read in no time


@dataclass
class ExpertCounters:
    """What the cache did. Byte counts are payload bytes of whole experts.

    read_seconds: in which at least one expert was on its way; wait_seconds: in which somebody waited for one.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0
    read_seconds: float = 0.0
    evictions: int = 0
    prefetch_useful_bytes: int = 0
    prefetch_wasted_bytes: int = 0
    warm_bytes: int = 0
    retries: int = 0


class ExpertStore:
    """The routed experts of a checkpoint in at most `budget` bytes of payload (None: as many as there are).

    0 stands for the least that works, the experts of one token of one layer. Raises ResourceError for a
    budget between that and 0. `slots` supplies the memory; it is called only by the thread that asks.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        budget: int | None = None,
        options: StreamOptions | None = None,
        slots: SlotProvider | None = None,
    ) -> None:
        self.options = options or StreamOptions()
        self.layout = ExpertLayout(checkpoint)
        self.counters = ExpertCounters()
        self.minimum = min(checkpoint.config.num_experts_per_token, self.layout.count)  # slots
        self.capacity = self._slots_in(budget)
        self.lock = threading.Condition()
        copies, stamps = find_copies(checkpoint.stamps, self.options.model_dirs)
        self.files = ExpertFiles(stamps, self._choose_direct(checkpoint), copies)
        self.pool = ReadPool(self.options.io_threads)
        self._provider = slots or NumpySlots()
        self.policy = make_policy(self.options.policy, max(1, self.capacity))
        self.entries: dict[Key, Entry] = {}
        self._free: list[SlotMemory] = []
        self._allocated = 0
        self.ahead = Speculation(self)
        self._closed = False
        self.reading = 0  # entries being filled, for anyone
        self._reading_since = 0.0
        self._warm: list[Key] = []
        config = checkpoint.config
        self.lookahead = Lookahead(self.options.lookahead, 2 * config.num_experts_per_token)
        self._trace: TraceWriter | None = None
        if self.options.expert_trace is not None:
            self._trace = TraceWriter(
                self.options.expert_trace, config.num_experts, config.num_experts_per_token
            )
        self._residency: Path | None = None
        if self._warm_start_wanted():
            self._residency = residency_path(checkpoint.folder)
            self.warm(load_residency(self._residency, self.layout))

    @property
    def payload(self) -> int:
        """Bytes of one expert."""
        return self.layout.payload

    @property
    def budget(self) -> int:
        """Bytes of payload that the cache may hold now."""
        return self.capacity * self.payload

    @property
    def streams(self) -> bool:
        """Whether there are more experts than slots."""
        return self.capacity < self.layout.count

    @property
    def smallest_budget(self) -> int:
        """Bytes of payload below which the store cannot work."""
        return self.minimum * self.payload

    def request(self, layer: int, experts: Iterable[int], in_order: bool = True) -> Request:
        """Start to fetch distinct experts of a layer; reads begin now, whatever the caller does meanwhile.

        Iterate over the result, once, to get them: in the given order, or with `in_order=False` as they come,
        those in memory first. Close it (it is a context manager) when it is not iterated to the end.
        """
        return Request(self, layer, [int(expert) for expert in experts], in_order)

    def fetch(self, layer: int, experts: Iterable[int]) -> Iterator[Held]:
        """Yield each expert in the given order; each may be used until the next is asked for.

        Raises ModelFilesError when the bytes cannot be read; the store stays usable.
        """
        with self.request(layer, experts) as request:
            for group in request.groups():
                yield from group

    def routed(self, layer: int, ids: NDArray[np.intp]) -> None:
        """Tell what a layer's router chose, ids [T, k]: for the trace and the lookahead's own measure."""
        if self._trace is not None:
            self._trace.record(layer, ids)
        self.lookahead.learn(layer, ids)

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """Tell which experts are likely for a layer to come, by rank; those that pay are read ahead."""
        chosen = self.lookahead.guess(layer, experts)
        if chosen and self.options.pipe:
            self.prefetch(layer, chosen)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Read experts that may be needed soon, most likely first, when no demand waits for the disk.

        Takes slots only from experts that no request needs; ends when that layer's request has begun.
        """
        with self.lock:
            self.ahead.begin(layer, experts)

    def warm(self, keys: Iterable[Key]) -> None:
        """Read these experts, the most valuable first, into slots that are empty, while there are any."""
        with self.lock:
            self._warm = list(keys)[: self.capacity][::-1]
            self.pump_warm()

    def resize(self, budget: int) -> int:
        """Change the budget; slots beyond it are given back as soon as they are idle. Returns the new one."""
        with self.lock:
            wanted = budget // self.payload if self.payload else 0
            self.capacity = min(self.layout.count, max(self.minimum, wanted))
            self.trim()
            return self.budget

    def drop_all(self) -> None:
        """Forget every expert that nobody uses; its slot stays for others."""
        with self.lock:
            for entry in list(self.entries.values()):
                if entry.state == READY and not (entry.wanted or entry.holds):
                    self.evict(entry)

    def residents(self) -> list[Key]:
        """The experts in memory, the most valuable first."""
        with self.lock:
            return [key for key in self.policy.residents() if self.entries[key].state == READY]

    def report(self) -> dict[str, Any]:
        """The `experts` part of a run's report."""
        counters = self.counters
        return {
            **vars(counters),
            **self.lookahead.report(),
            "policy": self.options.policy,
            "direct_io": self.files.direct,
            "io_threads": self.options.io_threads,
            "pipe": self.options.pipe,
            "cache_bytes": self.budget,
            "resident_bytes": len(self.entries) * self.payload,
        }

    def close(self) -> None:
        """Wait for reads in progress, then give files, threads and memory back."""
        if self._residency is not None and not self._closed:
            save_residency(self._residency, self.residents())
        self._closed = True
        self.pool.close()
        if self._trace is not None:
            self._trace.close()
        with self.lock:
            for entry in self.entries.values():
                self._provider.release(entry.memory)
            for memory in self._free:
                self._provider.release(memory)
            self.entries.clear()
            self._free.clear()
            self._allocated = 0
        self.files.close()

    # What follows is for Request and Speculation, under `lock`.

    def find(self, key: Key) -> Entry | None:
        """The entry of an expert that is in memory or on its way; a use, for the policy and the counters."""
        entry = self.entries.get(key)
        if entry is None:
            self.counters.misses += 1
            return None
        self.counters.hits += 1
        self.policy.touch(key)
        if entry.speculative:
            self.ahead.came_true(entry)
        if entry.job is not None:
            self.pool.hurry(entry.job)
        return entry

    def admit(self, key: Key, urgency: int, rank: int = 0) -> Entry | None:
        """Take a slot for an expert that has none and start to read it; None if every slot is needed."""
        memory = self._take_slot(urgency)
        if memory is None:
            return None
        entry = self.entries[key] = Entry(key, memory, self.layout.place(*key), urgency)
        self.policy.insert(key)
        if not self.reading:
            self._reading_since = perf_counter()
        self.reading += 1
        position = (rank, *entry.placement.position)
        entry.job = self.pool.submit(lambda job: self._fill(entry, job), urgency, position)
        return entry

    def steal(self, entry: Entry) -> None:
        """Drop a resident expert although a request wants it: it will be read again in its turn."""
        entry.wanted -= 1
        self.evict(entry)

    def evict(self, entry: Entry) -> None:
        """Free the slot of an expert that is in memory."""
        self._remove(entry)
        self.counters.evictions += 1

    def drop_unread(self, entry: Entry) -> None:
        """Free the slot of an entry whose read was cancelled before it began."""
        self._read_ended()
        entry.speculative = False
        self._remove(entry)

    def trim(self) -> None:
        """Give back slots beyond the capacity, as far as they are idle."""
        while self._allocated > self.capacity:
            if not self._free:
                victim = self.policy.victim(self._evictable)
                if victim is None:
                    return
                self.evict(self.entries[victim])
            self._provider.release(self._free.pop())
            self._allocated -= 1

    def pump_warm(self) -> None:
        """Keep a few reads of the warm start going while there are empty slots."""
        while self._warm and self.reading < 2 * self.pool.threads and self._has_empty_slot():
            key = self._warm.pop()
            if key not in self.entries:
                self.admit(key, WARM)

    def _slots_in(self, budget: int | None) -> int:
        if budget is None:
            return self.layout.count
        if 0 < budget < self.smallest_budget:
            raise ResourceError(
                f"expert cache of {budget} bytes is too small: expected at least {self.smallest_budget},"
                f" the {self.minimum} experts of one token in one layer (or 0 for just that)"
            )
        wanted = budget // self.payload if self.payload else 0
        return min(self.layout.count, max(self.minimum, wanted))

    def _warm_start_wanted(self) -> bool:
        wish = self.options.warm_start
        return wish == "on" or (wish == "auto" and self.layout.count * self.payload >= WARM_MIN_BYTES)

    def _choose_direct(self, checkpoint: Checkpoint) -> bool:
        wish = self.options.direct_io
        if wish == "auto":
            self.direct_choice = choose_direct(self.layout, checkpoint.stamps, self.options.io_threads)
            return self.direct_choice.direct
        self.direct_choice = DirectChoice(wish == "on")
        if wish == "on" and not direct_supported():
            raise ResourceError("direct I/O is not available on this system; use --direct-io auto or off")
        return wish == "on"

    def _has_empty_slot(self) -> bool:
        return bool(self._free) or self._allocated < self.capacity

    def _take_slot(self, urgency: int) -> SlotMemory | None:
        if self._free:
            return self._free.pop()
        if self._allocated < self.capacity:
            try:
                memory = self._provider.allocate(self.layout.slot_bytes)
            except MemoryError:
                if self._allocated < self.minimum:
                    raise
                self.capacity = self._allocated
            else:
                self._allocated += 1
                return memory
        victim = None if urgency == WARM else self.policy.victim(self._evictable)
        if victim is not None:
            self.evict(self.entries[victim])
        elif urgency == DEMAND:
            self.ahead.give_up_one()
        return self._free.pop() if self._free else None

    def _evictable(self, key: Key) -> bool:
        entry = self.entries[key]
        return entry.state == READY and not (entry.wanted or entry.holds or entry.speculative)

    def _remove(self, entry: Entry) -> None:
        del self.entries[entry.key]
        self.policy.remove(entry.key)
        self._free.append(entry.memory)
        if entry.speculative:
            self.counters.prefetch_wasted_bytes += self.payload

    def _read_ended(self) -> None:
        self.reading -= 1
        if not self.reading:
            self.counters.read_seconds += perf_counter() - self._reading_since

    def _count_retry(self) -> None:
        self.counters.retries += 1

    def _fill(self, entry: Entry, job: Job) -> None:
        """Read one expert into its slot, in a reading thread."""

        def give_up() -> bool:
            return job.cancelled or (job.urgency != DEMAND and self.pool.demanded())

        error: Exception | None = None
        try:
            fill(self.files, entry, None if job.urgency == DEMAND else give_up, self._count_retry)
        except Exception as caught:  # handed to the thread that asks
            error = caught
        with self.lock:
            if isinstance(error, ReadGivenUp) and entry.wanted:
                entry.job = self.pool.submit(lambda again: self._fill(entry, again), DEMAND, job.position)
                return
            self._read_ended()
            entry.job = None
            if error is None:
                entry.state = READY
                self.counters.bytes_read += self.payload
                if job.urgency == WARM:
                    self.counters.warm_bytes += self.payload
                if job.cancelled and entry.speculative and not entry.wanted:
                    self.ahead.abandon(entry)
            else:
                entry.state, entry.error = FAILED, error
                self._remove(entry)
                if isinstance(error, ReadGivenUp) and job.urgency == WARM:
                    self._warm.append(entry.key)
            self.lock.notify_all()
