"""The one thread that owns MLX: builds, evaluates and frees everything of the MLX backend.

MLX keeps streams by thread, and a thread that evaluates leaves a thread of the system behind, so the
whole process has one, whatever the number of engines. Callers wait; while they do, they keep the watchdog.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from k3mlx.watchdog import Watchdog

CHECK_SECONDS = 0.5
ABANDON_SECONDS = 5.0
T = TypeVar("T")


@dataclass
class Call:
    """One piece of work handed over; `abandoned` asks it to stop at the next layer."""

    work: Callable[[Call], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None
    abandoned: bool = False


class Owner:
    """A thread started with the first call; calls run one after the other, in the order they come."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[Call], T], watchdog: Watchdog) -> T:
        """The result of `work(call)`, run by the owner; what it raises is raised here.

        When waiting is interrupted, the work is told to stop and given a moment to do so.
        """
        call = Call(work)
        if threading.current_thread() is self._thread:
            return work(call)
        self._start()
        self._calls.put(call)
        try:
            while not call.done.wait(CHECK_SECONDS):
                watchdog.check()
        except BaseException:
            call.abandoned = True
            call.done.wait(ABANDON_SECONDS)
            raise
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="k3mlx-mlx", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call.result = call.work(call)
            except BaseException as error:
                call.error = error
            call.done.set()
            del call  # or it would hold the last step's arrays until the next call


OWNER = Owner()
