"""The verdict on figures: what makes them unsteady, each reason alone."""

import pytest

from k3mlx.bench import steady
from k3mlx.bench.steady import Neighbours, drift, judge, spread

EVEN = [1.00, 1.02, 0.99, 1.01, 1.00]


def test_even_repeats_on_an_idle_machine_are_steady():
    verdict = judge({"prompt": EVEN, "decode": [2 * s for s in EVEN]}, others=0.01)
    assert verdict.steady
    assert verdict.as_dict()["reasons"] == []


@pytest.mark.parametrize(
    ("seconds", "others", "reason"),
    [
        ([1.0, 1.12, 1.0, 1.12, 1.0], 0.0, "decode: repeats differ by 12%"),
        ([1.0, 1.02, 1.04, 1.06, 1.08], 0.0, "decode: 8% slower from the first repeat to the last"),
        ([1.08, 1.06, 1.04, 1.02, 1.0], 0.0, "decode: 8% faster from the first repeat to the last"),
        (EVEN, 0.2, "other processes used 20% of the processors"),
        (EVEN[:2], 0.0, "decode: 2 repeats, too few to tell"),
    ],
)
def test_each_reason(seconds, others, reason):
    verdict = judge({"decode": seconds}, others)
    assert verdict.reasons == (reason,)
    assert not verdict.steady


def test_a_system_that_does_not_tell_is_no_reason():
    assert judge({"decode": EVEN}, None).steady


def test_one_outlier_is_spread_and_no_drift():
    seconds = [1.0, 1.0, 1.0, 1.0, 1.5]
    assert spread(seconds) == pytest.approx(0.5)
    assert drift(seconds) == 0


def test_drift_is_of_the_whole_run():
    assert drift([1.0, 1.1, 1.2]) == pytest.approx(0.2 / 1.1)
    assert drift([1.0]) == 0


@pytest.mark.parametrize(
    ("busy", "own", "expected"), [(6.0, 2.0, 4 / 20), (2.0, 2.0, 0.0), (1.0, 2.0, 0.0), (40.0, 1.0, 1.0)]
)
def test_the_share_of_others(monkeypatch, busy, own, expected):
    """10 seconds on 2 processors."""
    now = {"busy": 100.0, "own": 50.0, "wall": 0.0}
    monkeypatch.setattr(steady, "busy_seconds", lambda: now["busy"])
    monkeypatch.setattr(steady, "_own_seconds", lambda: now["own"])
    monkeypatch.setattr(steady.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(steady.os, "cpu_count", lambda: 2)
    neighbours = Neighbours()
    now.update(busy=100.0 + busy, own=50.0 + own, wall=10.0)
    assert neighbours.share() == pytest.approx(expected)


def test_no_share_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(steady, "busy_seconds", lambda: None)
    assert Neighbours().share() is None
