"""The memory of a run: a plan that fits a budget, or a refusal that names the smallest, and its keeping.

Owns what goes where (weights, state, activations, reserve, expert cache), the size of prompt chunks, and
the shrinking of the cache under pressure. Measures and allocates nothing itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from . import machine
from .errors import ResourceError
from .memory import format_size
from .needs import Needs

LADDER = (1, 16, 64, 256, 1024, 4096, 8192)  # prompt tokens of a pass
CHUNK_SHARE = 8  # activations get at most one part in so many of the budget
AUTO_SHARE = 0.9  # of the memory that could be had, without `--memory`
CHECK_SECONDS = 0.5
SHRINK = {machine.WARN: 0.75, machine.CRITICAL: 0.5}  # what is left of the cache after one step

log = logging.getLogger("k3mlx")


@dataclass(frozen=True)
class MemoryPlan:
    """Where the bytes of a budget go. `resident` layers keep their weights, the others are read at each use."""

    memory: int
    source: str
    process: int
    weights: int
    state: int
    activations: int
    reserve: int
    cache: int
    chunk: int
    resident: tuple[int, ...]
    dense_bytes_per_pass: int

    def lines(self) -> list[str]:
        """Every term, for people."""
        terms = " + ".join(
            f"{name} {format_size(getattr(self, name))}"
            for name in ("process", "weights", "state", "activations", "reserve", "cache")
        )
        lines = [f"memory {format_size(self.memory)} ({self.source}) = {terms}; prompt chunk {self.chunk}"]
        if self.dense_bytes_per_pass:
            lines.append(
                f"dense weights do not fit: {len(self.resident)} layers stay in memory,"
                f" {format_size(self.dense_bytes_per_pass)} are read at every pass"
            )
        return lines

    def report(self) -> dict[str, Any]:
        """The terms, for a report."""
        terms = asdict(self)
        terms["resident"] = len(self.resident)
        return terms


def plan_memory(
    needs: Needs, memory: int | None, expert_cache: int | None, chunk: int | None = None
) -> MemoryPlan:
    """Fit a model into `memory` bytes (None: what the machine has to give).

    expert_cache: payload bytes that the cache gets, None for what is left. chunk: prompt tokens of a pass, None
    for the largest of the ladder whose activations take no more than their share; the cache has no say in it.
    Raises ResourceError, naming the smallest budget that works, when this one does not.
    """
    if memory is None:
        budget, stable, source = _automatic(needs.process)
    else:
        budget, stable, source = memory, memory, "as asked"
    chosen = chunk or _chunk(needs, budget, stable)
    slot = needs.expert + needs.padding
    slots = needs.least if expert_cache is None else _slots(needs, expert_cache)
    if _least(needs, budget, chosen, slots) > budget:
        raise ResourceError(_refusal(needs, budget, source, chunk, expert_cache))
    activations, reserve = needs.activations(chosen), _reserve(needs, budget)
    fixed = needs.process + needs.state + activations + reserve + slots * slot
    resident = _resident(needs, budget - fixed)
    weights, streamed = _weights(needs, resident)
    left = budget - (fixed - slots * slot) - weights
    if expert_cache is None:
        slots = min(needs.experts, left // slot) if slot else 0
    return MemoryPlan(
        memory=budget,
        source=source,
        process=needs.process,
        weights=weights,
        state=needs.state,
        activations=activations,
        reserve=reserve + slots * needs.padding,
        cache=slots * needs.expert,
        chunk=chosen,
        resident=resident,
        dense_bytes_per_pass=streamed,
    )


def smallest_memory(needs: Needs, chunk: int | None = None, expert_cache: int | None = None) -> int:
    """The smallest budget that `plan_memory` accepts."""
    slots = needs.least if expert_cache is None else _slots(needs, expert_cache)
    found = []
    for size in (chunk,) if chunk else LADDER:
        budget = _solve(needs, size, slots)
        if not chunk:  # not before this size is the one that is chosen
            alone = _solve(needs, size, needs.least)
            least = 0 if size == LADDER[0] else CHUNK_SHARE * needs.activations(size)
            budget = max(budget, alone, least)
            if _chunk(needs, budget, budget) != size:
                continue
        found.append(budget)
    return min(found)


def smallest_with(needs: Needs, enough: Callable[[MemoryPlan], bool]) -> int:
    """A budget whose plan is `enough` (such as `all_resident`) while that of a byte less is not, by bisection.

    From some budget on every plan must be enough.
    """
    low = high = smallest_memory(needs)
    while not enough(plan_memory(needs, high, None)):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        if enough(plan_memory(needs, middle, None)):
            high = middle
        else:
            low = middle + 1
    return low


def all_resident(plan: MemoryPlan) -> bool:
    """Whether no pass reads dense weights."""
    return plan.dense_bytes_per_pass == 0


def _least(needs: Needs, budget: int, chunk: int, slots: int) -> int:
    """What a run takes that keeps as little as it can, within a process of `budget` bytes."""
    fixed = needs.process + needs.state + needs.activations(chunk) + _reserve(needs, budget)
    return fixed + needs.streamed_least + slots * (needs.expert + needs.padding)


def _solve(needs: Needs, chunk: int, slots: int) -> int:
    """The smallest budget with room for its own least; the reserve grows with it, by a small part."""
    budget = 0
    while (least := _least(needs, budget, chunk, slots)) > budget:
        budget = least
    return budget


def _reserve(needs: Needs, budget: int) -> int:
    """For what no formula counts: fragments of freed memory, buffers of reads, the interpreter's own growth."""
    return needs.scratch(budget) + max(48 << 20, budget // 32)


def _chunk(needs: Needs, budget: int, stable: int) -> int:
    """The largest size whose activations take no more than their share and fit beside the smallest cache.

    The share is of `stable`, which does not change from one run to the next, as bits depend on the size.
    """
    fitting = (
        size
        for size in LADDER
        if needs.activations(size) <= stable // CHUNK_SHARE
        and _least(needs, budget, size, needs.least) <= budget
    )
    return max(fitting, default=LADDER[0])


def _slots(needs: Needs, expert_cache: int) -> int:
    wanted = expert_cache // needs.expert if needs.expert else 0
    return min(needs.experts, max(needs.least, wanted))


def _resident(needs: Needs, room: int) -> tuple[int, ...]:
    """The layers whose weights stay in memory, spread evenly, so that the reads of others have time."""
    layers = needs.dense.layers
    if needs.dense.total <= room or needs.ring is None:
        return tuple(range(len(layers)))
    room -= needs.dense.outer + needs.ring
    low, high = 0, len(layers)
    while low < high:  # the largest number of evenly spread layers that fits
        count = (low + high + 1) // 2
        if sum(layers[n] for n in _spread(len(layers), count)) <= room:
            low = count
        else:
            high = count - 1
    if low >= len(layers) - 1:
        return tuple(range(len(layers)))  # the ring alone would hold the last one for good
    return _spread(len(layers), low)


def _spread(total: int, count: int) -> tuple[int, ...]:
    return tuple(sorted({total - 1 - (n * total) // count for n in range(count)})) if count else ()


def _weights(needs: Needs, resident: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of weights in memory, and bytes that each pass reads."""
    layers = needs.dense.layers
    if len(resident) == len(layers):
        return needs.dense.total, 0
    kept = sum(layers[n] for n in resident)
    read = sum(size for n, size in enumerate(needs.dense.stored) if n not in resident)
    return needs.dense.outer + kept + (needs.ring or 0), read


def _automatic(process: int) -> tuple[int, int, str]:
    """The budget, what it would be with nothing else running, and where the figures come from."""
    room = machine.available_memory()
    if room is None:
        return 1 << 62, 1 << 62, "no limit known"
    return (
        int(process + AUTO_SHARE * room.free),
        int(AUTO_SHARE * room.total),
        f"automatic, from {room.source}",
    )


def _refusal(needs: Needs, budget: int, source: str, chunk: int | None, expert_cache: int | None) -> str:
    smallest = smallest_memory(needs, chunk, expert_cache)
    terms = (
        f"process {format_size(needs.process)}, weights {format_size(needs.streamed_least)},"
        f" state {format_size(needs.state)}, activations {format_size(needs.activations(chunk or LADDER[0]))},"
        f" {needs.least} experts {format_size(needs.least * (needs.expert + needs.padding))}, rest reserve"
    )
    return (
        f"memory of {budget} bytes ({source}) is too small: expected at least {smallest}"
        f" ({format_size(smallest)}: {terms})"
    )


class Cache(Protocol):
    """What the governor may make smaller."""

    @property
    def budget(self) -> int:
        """Bytes of payload that it may hold."""

    def resize(self, budget: int) -> int:
        """Set the budget in bytes of payload; returns what it is now."""


class Governor:
    """Keeps a plan: asked between layers, it shrinks the cache when memory is short, and never grows it back."""

    def __init__(
        self,
        plan: MemoryPlan,
        cache: Cache,
        pressure: Callable[[], int] = machine.pressure,
        footprint: Callable[[], int | None] = machine.footprint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.shrinks = 0
        self._cache = cache
        self._pressure = pressure
        self._footprint = footprint
        self._clock = clock
        self._next = clock()

    def check(self) -> None:
        """Look at memory, at most every half second, and give some back if it is short."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + CHECK_SECONDS
        size = self._cache.budget
        level = self._pressure()
        used = self._footprint() or 0
        if level:
            self._shrink(int(size * SHRINK[level]), "memory is short")
            self._next = now + 4 * CHECK_SECONDS  # for what was given back to show
        elif used > self.plan.memory:
            self._shrink(size - (used - self.plan.memory), f"the process has {format_size(used)}")

    def report(self) -> dict[str, Any]:
        return {**self.plan.report(), "shrinks": self.shrinks}

    def _shrink(self, wanted: int, why: str) -> None:
        before = self._cache.budget
        after = self._cache.resize(wanted)
        if after < before:
            self.shrinks += 1
            log.warning("k3mlx: %s: expert cache %s -> %s", why, format_size(before), format_size(after))
