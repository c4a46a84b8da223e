"""One expert in the cache: its slot, the state of its read, who uses it, and the views that are handed out.

Knows neither the cache that it is in nor the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from numpy.typing import NDArray

from .layout import Placement
from .policies import Key
from .reads import LOOKAHEAD, Job
from .slots import SlotMemory

READING, READY, FAILED = "reading", "ready", "failed"


@dataclass(frozen=True, eq=False)
class Held:
    """An expert whose slot is in use: `parts` are views of it, as stored, by name ("w1.weight_packed").

    The same object as long as the expert is in memory. `placement.parts[name].start` is where a part starts in
    `memory.bytes` (for a provider's own arrays).
    """

    expert: int
    parts: dict[str, NDArray]
    memory: SlotMemory
    placement: Placement


class Entry:
    """One slot that holds an expert or is being filled with it. Guarded by the store's lock."""

    def __init__(self, key: Key, memory: SlotMemory, placement: Placement, urgency: int) -> None:
        self.key = key
        self.memory = memory
        self.placement = placement
        self.state = READING
        self.wanted = 0  # requests that still have to hand it out
        self.holds = 0  # requests that have handed it out and not taken it back
        self.speculative = urgency == LOOKAHEAD  # read ahead and not used yet
        self.job: Job | None = None
        self.error: Exception | None = None

    @cached_property
    def held(self) -> Held:
        """What is handed out, made at the first use: an expert that stays is used many times."""
        memory = self.memory
        return Held(self.key[1], self.placement.views(memory.bytes), memory, self.placement)
