"""Several files at once: the first failure ends the others, and what was finished before it is told."""

import threading
import time

import numpy as np
import pytest

from k3mlx.convert.files import Target, write_all
from k3mlx.errors import ResourceError

PIECES = 2000


def target(folder, name, produce):
    return Target.of(folder / name, [("x", "U8", (PIECES,))], produce)


def test_a_failure_stops_those_that_are_at_work(tmp_path):
    at_work, written = threading.Event(), []

    def slow(write):
        for _ in range(PIECES):
            write(np.zeros(1, np.uint8))
            written.append(1)
            at_work.set()
            time.sleep(0.002)
        return {}

    def failing(write):
        assert at_work.wait(30)
        raise ResourceError("disk full")

    with pytest.raises(ResourceError, match="disk full"):
        write_all(
            [target(tmp_path, "slow", slow), target(tmp_path, "failing", failing)],
            2,
            lambda target, record: None,
            lambda done, total: None,
        )
    assert 0 < len(written) < PIECES
    assert list(tmp_path.iterdir()) == []


def test_what_was_finished_beside_a_failure_is_told_first(tmp_path):
    """Both have ended when the caller looks next: the error of the one must not lose the record of the other."""
    gate, failed, told = threading.Event(), threading.Event(), []

    def right(write):
        assert gate.wait(30)
        write(np.zeros(PIECES, np.uint8))
        return {"x": 0.25}

    def failing(write):
        assert gate.wait(30)
        failed.set()
        raise ResourceError("disk full")

    def quick(write):
        write(np.zeros(PIECES, np.uint8))
        return {}

    def look_later(done, total):
        gate.set()
        assert failed.wait(30)
        while not (tmp_path / "right").exists():
            time.sleep(0.01)
        time.sleep(0.1)  # for both futures to be told

    produces = {"right": right, "failing": failing, "quick": quick}
    with pytest.raises(ResourceError):
        write_all(
            [target(tmp_path, name, produce) for name, produce in produces.items()],
            3,
            lambda target, record: told.append((record.name, record.errors)),
            look_later,
        )
    assert told == [("quick", {}), ("right", {"x": 0.25})]
