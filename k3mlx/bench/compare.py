"""One result against another: ratios of medians, and how far the repeats let them lie.

Owns the ratio and its range, and what two results must have in common to be compared. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .result import Figure

SETTINGS = ("machine", "versions", "model", "runs_on", "options")


@dataclass(frozen=True)
class Ratio:
    """This figure over that of the other result. low, high: of the worst and best pair of repeats."""

    name: str
    unit: str
    this: float
    other: float
    ratio: float
    low: float
    high: float

    @property
    def within(self) -> bool:
        """Whether the repeats of both overlap, so that the ratio may be 1."""
        return self.low <= 1 <= self.high


def compare(this: Mapping[str, Figure], other: Mapping[str, Figure]) -> list[Ratio]:
    """A ratio for each figure that both have in the same unit and that is never 0."""
    return [
        Ratio(
            name, mine.unit, mine.median, theirs.median, mine.median / theirs.median,
            mine.low / theirs.high, mine.high / theirs.low,
        )
        for name, mine in this.items()
        if (theirs := other.get(name)) and theirs.unit == mine.unit and min(*mine.values, *theirs.values) > 0
    ]  # fmt: skip


def differences(this: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What else differs between two results: a line for each setting or fact."""
    lines = []
    for group in SETTINGS:
        mine, theirs = this.get(group) or {}, other.get(group) or {}
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                lines.append(f"{group}: {name} is {mine.get(name)}, in the other {theirs.get(name)}")
    return lines
