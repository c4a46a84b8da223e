"""The queue of reads: urgency, order of the disk, cancelling, closing."""

import threading

import pytest

from k3mlx.experts.reads import DEMAND, LOOKAHEAD, WARM, ReadPool

from .models import deadline, nothing_left_behind


class Gate:
    """Jobs that note their name; the first one holds the only thread until it is let go."""

    def __init__(self, pool):
        self.done, self.go, self.running = [], threading.Event(), threading.Event()
        pool.submit(self._first, DEMAND, (0,))
        assert self.running.wait(5)

    def _first(self, job):
        self.running.set()
        assert self.go.wait(5)

    def job(self, name):
        return lambda job: self.done.append(name)


def test_urgent_reads_first_then_in_the_order_of_the_disk():
    with deadline(10), nothing_left_behind():
        pool = ReadPool(1)
        gate = Gate(pool)
        pool.submit(gate.job("warm"), WARM, (0,))
        pool.submit(gate.job("ahead 2"), LOOKAHEAD, (2,))
        pool.submit(gate.job("ahead 1"), LOOKAHEAD, (1,))
        for position in (5, 3, 4):
            pool.submit(gate.job(position), DEMAND, (position,))
        assert pool.demanded()
        last = threading.Event()
        pool.submit(lambda job: last.set(), WARM, (9,))
        gate.go.set()
        assert last.wait(5)
        assert gate.done == [3, 4, 5, "ahead 1", "ahead 2", "warm"]
        assert not pool.demanded()
        pool.close()


def test_a_hurried_read_overtakes_and_runs_once():
    with deadline(10), nothing_left_behind():
        pool = ReadPool(1)
        gate = Gate(pool)
        pool.submit(gate.job("other"), LOOKAHEAD, (1,))
        job = pool.submit(gate.job("hurried"), LOOKAHEAD, (2,))
        assert not pool.demanded()
        pool.hurry(job)
        assert pool.demanded()
        last = threading.Event()
        pool.submit(lambda job: last.set(), WARM, (9,))
        gate.go.set()
        assert last.wait(5)
        assert gate.done == ["hurried", "other"]
        pool.close()


def test_cancelled_reads_never_start():
    with deadline(10), nothing_left_behind():
        pool = ReadPool(1)
        gate = Gate(pool)
        demand = pool.submit(gate.job("demand"), DEMAND, (1,))
        ahead = pool.submit(gate.job("ahead"), LOOKAHEAD, (2,))
        assert pool.cancel(demand)
        assert pool.cancel(ahead)
        assert not pool.demanded()
        gate.go.set()
        pool.close()
        assert gate.done == []
        assert not pool.cancel(demand) or not demand.started


def test_closing_drops_what_waits_and_waits_for_what_runs():
    with deadline(10), nothing_left_behind():
        pool = ReadPool(2)
        started, go, ended = threading.Event(), threading.Event(), []

        def slow(job):
            started.set()
            go.wait(5)
            ended.append(1)

        pool.submit(slow, DEMAND, (0,))
        assert started.wait(5)
        threading.Timer(0.1, go.set).start()
        pool.close()
        assert ended == [1]
        with pytest.raises(RuntimeError, match="after the reads were closed"):
            pool.submit(slow, DEMAND, (0,))


def test_no_thread_before_the_first_read():
    with nothing_left_behind():
        ReadPool(8)
