"""The thread that owns MLX: results and errors reach the caller, and a caller that leaves stops the work."""

import os
import sys
import threading
import time

import pytest

import k3mlx
from k3mlx.model.owner import Owner
from k3mlx.watchdog import Watchdog


def test_all_work_is_done_by_one_thread():
    owner, seen = Owner(), []

    def work(call):
        seen.append(threading.current_thread())
        return len(seen)

    callers = [threading.Thread(target=lambda: owner.call(work, Watchdog())) for _ in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(10)
    assert owner.call(work, Watchdog()) == 6
    assert len(set(seen)) == 1
    assert seen[0] is not threading.current_thread()


def test_what_the_work_raises_is_raised_to_the_caller():
    def fail(call):
        raise LookupError("not there")

    owner = Owner()
    with pytest.raises(LookupError, match="not there"):
        owner.call(fail, Watchdog())
    assert owner.call(lambda call: 3, Watchdog()) == 3


def test_work_may_call_the_owner_again():
    owner = Owner()
    assert owner.call(lambda call: owner.call(lambda inner: 4, Watchdog()), Watchdog()) == 4


def test_an_interrupted_caller_stops_the_work(monkeypatch):
    class Interrupted(Watchdog):
        def check(self):
            raise KeyboardInterrupt

    monkeypatch.setattr("k3mlx.model.owner.CHECK_SECONDS", 0.01)
    stopped = threading.Event()

    def work(call):
        while not call.abandoned:
            time.sleep(0.01)
        stopped.set()

    with pytest.raises(KeyboardInterrupt):
        Owner().call(work, Interrupted())
    assert stopped.wait(5)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_engines_share_the_streams(byte_model):
    """A stream is a thread of the system that never ends: many engines must not mean many threads."""
    counts = []
    for _ in range(3):
        with k3mlx.load(
            byte_model, backend="mlx", device="cpu", experts_kernel="stream", cpu_threads=3
        ) as engine:
            engine.session().feed([1, 2, 3])
            streams = engine.backend.room.experts.streams
            counts.append(os_threads())
    assert len({str(stream) for stream in streams}) == 3
    assert counts[0] == counts[2]


def os_threads():
    return len(os.listdir("/proc/self/task"))
