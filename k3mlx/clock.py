"""Which part of the work the time went to. Owns the stopwatches; the report is in `engine.py`."""

import time
from collections.abc import Sequence


class Stopwatch:
    """Adds up the time inside its `with` blocks, which do not overlap."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter() - self._since


class Clock:
    """Attributes wall time to the part entered last. One thread's clock; seconds by part name.

    Runs between `resume` and `pause`, so that time outside a forward pass belongs to nobody.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.resume()

    def resume(self) -> None:
        """Start counting, in `other`."""
        self._part, self._since = "other", time.perf_counter()

    def enter(self, part: str) -> None:
        """From now on, time belongs to `part`."""
        now = time.perf_counter()
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    @property
    def part(self) -> str:
        """The part entered last."""
        return self._part

    def move(self, parts: Sequence[str], seconds: Sequence[float]) -> None:
        """So much of the time since the last `enter` belongs to other parts."""
        for part, took in zip(parts, seconds, strict=True):
            if part != self._part:
                self.seconds[part] = self.seconds.get(part, 0.0) + took
                self._since += took

    def pause(self) -> None:
        """Stop counting."""
        self.enter("other")
