"""Ctrl-C during an answer: the first asks to stop between two layers, the second stops at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from .options import note


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that is filled by the first Ctrl-C; the second one interrupts for good."""
    interrupts: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)
        note("\nstopping; once more to stop at once")

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)
