"""Which part of the work the time went to. Owns the stopwatch; the report is in `engine.py`."""

import time


class Clock:
    """Attributes wall time to the part entered last. One thread's clock; seconds by part name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._part = "other"
        self._since = time.perf_counter()

    def enter(self, part: str) -> None:
        """From now on, time belongs to `part`."""
        now = time.perf_counter()
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now
