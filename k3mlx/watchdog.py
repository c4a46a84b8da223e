"""Ends the process when a piece of work that cannot be interrupted does not return by its deadline.

Owns the deadline, the note of the ids and the last line on stderr. Whoever waits for the work calls `check`
now and then; the work itself is inside `watch`. Knows nothing of models.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def save_ids(ids: Sequence[int]) -> Path:
    """Write ids as a JSON list to a new file of the temporary folder, readable by this user only."""
    descriptor, name = tempfile.mkstemp(prefix="k3mlx-ids-", suffix=".json")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump([int(id) for id in ids], file)
    return Path(name)


def end_process(line: str) -> None:
    """Print a last line and end at once, whatever other threads are waiting for. Exit code 1."""
    print(line, file=sys.stderr, flush=True)
    os._exit(1)


class Watchdog:
    """One piece of work at a time, done by one thread and waited for by another.

    scale multiplies every deadline. end is called with one line when a deadline has passed; it must not return
    to a caller that still waits.
    """

    def __init__(self, scale: float = 1.0, end: Callable[[str], None] = end_process) -> None:
        self.scale = scale
        self.ids: Sequence[int] = ()  # fed before the present pass, to be saved if it never ends
        self._end = end
        self._lock = threading.Lock()
        self._work: tuple[str, float, float] | None = None  # what, seconds allowed, when it is over

    @contextmanager
    def watch(self, what: str, seconds: float) -> Iterator[None]:
        """The work inside must end within `seconds`."""
        allowed = seconds * self.scale
        with self._lock:
            self._work = what, allowed, time.monotonic() + allowed
        try:
            yield
        finally:
            with self._lock:
                self._work = None

    def check(self) -> None:
        """End the process if the work that is watched is late."""
        with self._lock:
            late = self._work is not None and time.monotonic() > self._work[2]
            work = self._work
        if late and work is not None:
            what, allowed, _ = work
            path = save_ids(self.ids)
            self._end(
                f"k3mlx: error: {what} did not return within {allowed:.3g} s; the process ends here."
                f" {len(self.ids)} ids fed so far are in {path}"
            )
