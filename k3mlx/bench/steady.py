"""Whether figures can be trusted: spread and drift of repeats, and what other processes took of the processors.

Owns the criterion. Heat shows as drift, a neighbour as its share of the processors; a load that is there the
whole time makes every repeat equally slow and only the latter tells.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from k3mlx.machine import busy_seconds

SPREAD_MAX = 0.10  # of the median, between the fastest and the slowest repeat
DRIFT_MAX = 0.05  # of the median, from the first repeat to the last along their trend
OTHERS_MAX = 0.05  # of all processors, in use by other processes
REPEATS_MIN = 3
CRITERION = (
    f"{REPEATS_MIN} repeats or more within {SPREAD_MAX:.0%}, a trend of at most {DRIFT_MAX:.0%}, other processes on at"
    f" most {OTHERS_MAX:.0%} of the processors"
)


@dataclass(frozen=True)
class Steadiness:
    """A verdict; `reasons` are empty for steady figures. others: share of the processors, None if not known."""

    reasons: tuple[str, ...]
    others: float | None

    @property
    def steady(self) -> bool:
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        return {
            "steady": self.steady,
            "reasons": list(self.reasons),
            "others": self.others,
            "criterion": CRITERION,
        }


class Neighbours:
    """Looks at what other processes use of the processors between its making and `share`.

    Processes that this one has started and waited for are not others.
    """

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float | None:
        """Of all processors, 0 to 1; None where the system does not tell."""
        busy, own, wall = (now - then for now, then in zip(self._now(), self._start, strict=True))
        cores = os.cpu_count() or 1
        if busy != busy or wall <= 0:
            return None
        return min(1.0, max(0.0, busy - own) / (wall * cores))

    def _now(self) -> tuple[float, float, float]:
        busy = busy_seconds()
        return (float("nan") if busy is None else busy), _own_seconds(), time.perf_counter()


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def judge(repeats: Mapping[str, Sequence[float]], others: float | None) -> Steadiness:
    """The verdict on the seconds of each repeat, in the order they were taken, by what was repeated."""
    reasons = [reason for name, seconds in repeats.items() for reason in _reasons(name, seconds)]
    if others is not None and others > OTHERS_MAX:
        reasons.append(f"other processes used {others:.0%} of the processors")
    return Steadiness(tuple(reasons), others)


def spread(seconds: Sequence[float]) -> float:
    """From the fastest to the slowest, in parts of the median."""
    return (max(seconds) - min(seconds)) / median(seconds)


def drift(seconds: Sequence[float]) -> float:
    """What the last takes longer than the first along the trend, in parts of the median: Theil and Sen's slope, the
    median over all pairs, which one outlier does not move."""
    if len(seconds) < 2:
        return 0.0
    pairs = combinations(enumerate(seconds), 2)
    slope = median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)
    return slope * (len(seconds) - 1) / median(seconds)


def _reasons(name: str, seconds: Sequence[float]) -> list[str]:
    if len(seconds) < REPEATS_MIN:
        return [f"{name}: {len(seconds)} repeats, too few to tell"]
    reasons = []
    if spread(seconds) > SPREAD_MAX:
        reasons.append(f"{name}: repeats differ by {spread(seconds):.0%}")
    if abs(drift(seconds)) > DRIFT_MAX:
        which = "slower" if drift(seconds) > 0 else "faster"
        reasons.append(f"{name}: {abs(drift(seconds)):.0%} {which} from the first repeat to the last")
    return reasons
