"""Threads that run reads, the most urgent first, those of one urgency in the order of the disk.

Owns the queue and the threads. Does not know what a read is, and never raises: jobs keep their own
results.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any

DEMAND, LOOKAHEAD, WARM = range(3)  # urgency, most urgent first


class Job:
    """One read in the queue; `cancelled` or `urgency` may change until it ends."""

    def __init__(self, run: Callable[[Job], None], urgency: int, position: Any) -> None:
        self.run = run
        self.urgency = urgency
        self.position = position
        self.started = False
        self.cancelled = False


class ReadPool:
    """`threads` threads over one queue, started with the first job. `position`s must be comparable."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._changed = threading.Condition()
        self._heap: list[tuple[int, Any, int, Job]] = []
        self._order = itertools.count()
        self._workers: list[threading.Thread] = []
        self._demands = 0  # urgent jobs that are waiting
        self._closed = False

    def submit(self, run: Callable[[Job], None], urgency: int, position: Any) -> Job:
        """Queue a job. Raises RuntimeError after `close`."""
        job = Job(run, urgency, position)
        with self._changed:
            if self._closed:
                raise RuntimeError("a read was asked for after the reads were closed")
            self._push(job)
            if len(self._workers) < self.threads:
                name = f"k3mlx-read-{len(self._workers)}"
                worker = threading.Thread(target=self._work, name=name, daemon=True)
                self._workers.append(worker)
                worker.start()
            self._changed.notify()
        return job

    def hurry(self, job: Job) -> None:
        """Make a job that is still waiting as urgent as a demand."""
        with self._changed:
            if job.urgency == DEMAND:
                return
            job.urgency = DEMAND
            if not job.started and not job.cancelled:
                self._push(job)  # the old entry is recognised by its urgency and dropped

    def cancel(self, job: Job) -> bool:
        """Stop a job: True if it had not started and never will, else it is told and ends soon."""
        with self._changed:
            if not job.started and not job.cancelled and job.urgency == DEMAND:
                self._demands -= 1
            job.cancelled = True
            return not job.started

    def demanded(self) -> bool:
        """Whether urgent jobs are waiting for a thread: less urgent ones may give theirs up."""
        return self._demands > 0

    def close(self) -> None:
        """Drop what has not started, wait for what has, end the threads."""
        with self._changed:
            self._closed = True
            for *_, job in self._heap:
                job.cancelled = True
            self._heap.clear()
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()
        self._workers.clear()

    def _push(self, job: Job) -> None:
        heapq.heappush(self._heap, (job.urgency, job.position, next(self._order), job))
        self._demands += job.urgency == DEMAND

    def _work(self) -> None:
        while True:
            with self._changed:
                job = self._next()
            if job is None:
                return
            job.run(job)
            del job  # or this thread would keep its slot until the next read

    def _next(self) -> Job | None:
        while True:
            while self._heap:
                urgency, _, _, job = heapq.heappop(self._heap)
                if job.started or job.cancelled or job.urgency != urgency:
                    continue
                job.started = True
                self._demands -= urgency == DEMAND
                return job
            if self._closed:
                return None
            self._changed.wait()
