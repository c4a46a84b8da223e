"""How far something long has come, on stderr: a prompt that is read, or anything else a line can tell.

A terminal gets one line that is written over and erased at the end, a file a line now and then.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TextIO

QUIET_SECONDS = 2.0  # nothing is said before
TERMINAL_SECONDS, FILE_SECONDS = 0.5, 30.0  # between two lines


class StatusLine:
    """A line of progress: at most one each half second on a terminal, each 30 seconds in a file."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stderr
        self._clock = clock
        self._terminal = self._out.isatty()
        self._next = clock()
        self._shown = 0  # characters on the line

    def wait(self, seconds: float) -> None:
        """Say nothing for so long."""
        self._next = self._clock() + seconds

    def due(self) -> bool:
        """Whether it is time for the next line, which is then expected."""
        if self._clock() < self._next:
            return False
        self.wait(TERMINAL_SECONDS if self._terminal else FILE_SECONDS)
        return True

    def show(self, text: str) -> None:
        """Write `text` in the place of what is on the line."""
        if self._terminal:
            self._write("\r" + text.ljust(self._shown))
            self._shown = len(text)
        else:
            self._write(text + "\n")

    def note(self, text: str) -> None:
        """A line that stays."""
        self.erase()
        self._write(text + "\n")

    def erase(self) -> None:
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")
            self._shown = 0

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that went away is not the work's failure
            self._out.write(text)
            self._out.flush()


class PromptProgress:
    """Told (layers done, layers in all) at each layer of each pass, and at the end with both equal."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._line = StatusLine(out, clock)
        self._started = 0.0

    def __call__(self, done: int, total: int) -> None:
        if done == 0:
            self._started = self._clock()
            self._line.wait(QUIET_SECONDS)
        if done == total:
            self._line.erase()
        elif done and self._line.due():
            left = (self._clock() - self._started) / done * (total - done)
            self._line.show(f"prompt: layer {done} of {total}, {done / total:.0%}, {duration(left)} left")


def duration(seconds: float) -> str:
    """`8 s`, `3 min 0 s`, `5 h 12 min`, `2 d 3 h`."""
    whole = round(seconds)
    for size, name, smaller, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {part}"
    return f"{whole} s"
