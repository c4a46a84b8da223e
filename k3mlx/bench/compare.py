"""One result against another: ratios of figures, and where such a ratio can lie without a difference.

Owns the ratio and its range, and what two results must have in common to be compared. Measures nothing.

The repeats of one process share its place in memory, its threads and the clock of that moment: they lie closer
together than two processes do. So a process counts as one observation, the median of its repeats. The range is that of
Student's t for the difference of two means of their logarithms, with one variance for both results: each has few
processes, and they are processes of one machine. With one process on both sides there is no measure of that variance:
the range is that of the repeats, and nothing is called a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean
from typing import Any

from .result import Figure

SETTINGS = ("machine", "versions", "model", "runs_on", "options")
CONFIDENCE = 0.99  # of a range: of the 25 or so in a table, few are without 1 by chance
# Student's t at (1 + CONFIDENCE) / 2 for 1, 2, ... degrees of freedom; for more than 10 the last is a little wide.
STUDENT = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)
FINITE = 600.0  # of a logarithm whose exponential is a number


@dataclass(frozen=True)
class Ratio:
    """This figure over that of the other result, and its range.

    this, other: geometric means of the medians of their processes. known: the variation between processes is in the
    range; else low and high are those of the worst and best pair of repeats.
    """

    name: str
    unit: str
    this: float
    other: float
    ratio: float
    low: float
    high: float
    known: bool = True

    @property
    def within(self) -> bool:
        """Whether 1 is in the range."""
        return self.low <= 1 <= self.high

    @property
    def verdict(self) -> str:
        """`differs`, nothing, or, of one process each, a word on repeats that do not overlap."""
        return "" if self.within else "differs" if self.known else "beyond the repeats"


def compare(this: Mapping[str, Figure], other: Mapping[str, Figure]) -> list[Ratio]:
    """A ratio for each figure that both have in the same unit and that is never 0."""
    return [
        _ratio(name, mine, theirs)
        for name, mine in this.items()
        if (theirs := other.get(name)) and theirs.unit == mine.unit and min(*mine.values, *theirs.values) > 0
    ]


def _ratio(name: str, this: Figure, other: Figure) -> Ratio:
    mine, theirs = ([log(one) for one in figure.process_medians] for figure in (this, other))
    middle = fmean(mine) - fmean(theirs)
    means = exp(fmean(mine)), exp(fmean(theirs)), exp(middle)
    free = len(mine) + len(theirs) - 2
    if free == 0:
        return Ratio(name, this.unit, *means, this.low / other.high, this.high / other.low, known=False)
    squares = sum((one - fmean(group)) ** 2 for group in (mine, theirs) for one in group)
    error = sqrt(squares / free * (1 / len(mine) + 1 / len(theirs)))
    reach = min(FINITE, STUDENT[min(free, len(STUDENT)) - 1] * error)
    return Ratio(name, this.unit, *means, exp(middle - reach), exp(middle + reach))


def unsteady(this: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """A line for each of the two results whose figures are not to be trusted."""
    return [
        f"{name} is not steady: its ratios say little"
        for name, result in (("this result", this), ("the other", other))
        if not (result.get("steady") or {"steady": True})["steady"]
    ]


def differences(this: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What else differs between two results: a line for each setting or fact."""
    lines = []
    for group in SETTINGS:
        mine, theirs = this.get(group) or {}, other.get(group) or {}
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                lines.append(f"{group}: {name} is {mine.get(name)}, in the other {theirs.get(name)}")
    return lines
