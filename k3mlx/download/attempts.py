"""Trying again: how long to wait, when to give up, and how the threads of a download are told to end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from k3mlx.errors import K3Error

from .remote import Trouble


@dataclass(frozen=True)
class Patience:
    """timeout: seconds without a byte; attempts: failures in a row before giving up; waits in seconds, doubling.

    The defaults give up after six minutes of waiting and as many time-outs, long enough for a router to restart.
    """

    timeout: float = 30.0
    attempts: int = 12
    first_wait: float = 1.0
    longest_wait: float = 60.0


class Stopped(Exception):
    """The download is to end: somebody asked, or another file met something that ends all."""


class Meter:
    """What the threads of a download have done, for the one thread that shows it.

    total: bytes of all files; done: bytes of them that are here; received: bytes that came from the network;
    hashed: bytes read from disk and hashed, of to_hash.
    """

    def __init__(self) -> None:
        self.total = self.done = self.received = self.to_hash = self.hashed = 0
        self._notes: deque[str] = deque()
        self._lock = threading.Lock()

    def add(self, done: int = 0, received: int = 0, hashed: int = 0) -> None:
        with self._lock:
            self.done += done
            self.received += received
            self.hashed += hashed

    def note(self, text: str) -> None:
        self._notes.append(text)

    def take_notes(self) -> list[str]:
        """The lines since the last call."""
        return [self._notes.popleft() for _ in range(len(self._notes))]


class Attempts:
    """Counts failures in a row and waits after each, saying so."""

    def __init__(self, patience: Patience, stop: threading.Event, say: Callable[[str], None]) -> None:
        self._patience = patience
        self._stop = stop
        self._say = say
        self._failures = 0

    def progressed(self) -> None:
        self._failures = 0

    def failed(self, trouble: Trouble) -> None:
        """Wait before the next attempt. Raises K3Error when there is none, Stopped when told so meanwhile."""
        self._failures += 1
        if self._failures >= self._patience.attempts:
            raise K3Error(
                f"{trouble}; gave up after {self._failures} attempts. What came is kept:"
                " check the connection and run the same command again"
            )
        wait = trouble.wait
        if wait is None:
            wait = min(self._patience.longest_wait, self._patience.first_wait * 2 ** (self._failures - 1))
        self._say(f"{trouble}; next attempt in {wait:.3g} s")
        if self._stop.wait(wait):
            raise Stopped
