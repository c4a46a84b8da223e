"""Settling many files at once in threads, while the calling thread watches.

The threads are daemons: one that waits for a dead connection holds up neither Ctrl-C nor the end of the
process. That is safe because a partial file is only ever appended to.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from time import monotonic

from k3mlx.checkpoint.findings import Findings
from k3mlx.errors import K3Error, ModelFilesError

from .attempts import Stopped
from .fetch import DamagedOffline, Job, WrongHash
from .survey import Entry

TICK_SECONDS = 0.1
GRACE_SECONDS = 2.0  # for threads to end what they are writing


def settle_all(job: Job, entries: Sequence[Entry], workers: int, watch: Callable[[], None]) -> None:
    """Settle every entry. A bad file is told at the end, any other failure ends all. Raises K3Error."""
    todo: queue.SimpleQueue[Entry] = queue.SimpleQueue()
    for entry in entries:
        todo.put(entry)
    bad: list[K3Error] = []
    fatal: list[BaseException] = []

    def work() -> None:
        try:
            while not job.stop.is_set():
                try:
                    job.settle(todo.get_nowait())
                except (WrongHash, DamagedOffline) as error:
                    bad.append(error)
        except (queue.Empty, Stopped):
            return
        except BaseException as error:
            fatal.append(error)
            job.stop.set()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(entries)))]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            watch()
            next((thread for thread in threads if thread.is_alive()), threads[0]).join(TICK_SECONDS)
    except BaseException:
        job.stop.set()
        raise
    finally:
        _await(threads)
        watch()
    if fatal:
        raise fatal[0]
    findings = Findings()
    for error in bad:
        findings.add(str(error))
    damaged = any(isinstance(error, ModelFilesError) for error in bad)
    findings.raise_if_any(ModelFilesError if damaged else K3Error)


def _await(threads: Sequence[threading.Thread]) -> None:
    end = monotonic() + GRACE_SECONDS
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, end - monotonic()))
