"""How far a prompt has been read, on stderr, for prompts that take more than two seconds.

A terminal gets one line that is written over and erased at the end, a file a line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

QUIET_SECONDS = 2.0  # nothing is said before
TERMINAL_SECONDS, FILE_SECONDS = 0.5, 30.0  # between two lines


class PromptProgress:
    """Told (layers done, layers in all) at each layer of each pass, and at the end with both equal."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stderr
        self._clock = clock
        self._terminal = self._out.isatty()
        self._started = self._next = 0.0
        self._shown = 0  # characters on the line

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done == 0:
            self._started, self._next = now, now + QUIET_SECONDS
        if done == total:
            self._write("", erase=True)
            self._next = 0.0
        elif done and now >= self._next:
            left = (now - self._started) / done * (total - done)
            self._next = now + (TERMINAL_SECONDS if self._terminal else FILE_SECONDS)
            self._write(f"prompt: layer {done} of {total}, {done / total:.0%}, {_duration(left)} left")

    def _write(self, text: str, erase: bool = False) -> None:
        if self._terminal:
            if text or self._shown:
                self._out.write("\r" + text.ljust(self._shown) + ("\r" if erase else ""))
            self._shown = len(text)
        elif text:
            self._out.write(text + "\n")
        self._out.flush()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
