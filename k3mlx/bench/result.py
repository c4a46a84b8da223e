"""The form of a benchmark's result: figures by name, each with the values it was taken from.

Owns the object that `--json` writes and `--compare` reads. Measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from k3mlx.errors import UsageError

FORM = 1  # of the object; another number is another form


@dataclass(frozen=True)
class Figure:
    """One quantity: a value of each repeat, in `unit`, process after process.

    repeats: how many of the values each process gave; empty where all are of one process.
    """

    unit: str
    values: tuple[float, ...]
    repeats: tuple[int, ...] = ()

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def process_medians(self) -> list[float]:
        """The median of each process's values."""
        rest = iter(self.values)
        return [median(islice(rest, count)) for count in self.repeats or (len(self.values),)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: unit, median, low, high, the values and, of several processes, how many values are of each."""
        return {
            "unit": self.unit,
            "median": self.median,
            "low": self.low,
            "high": self.high,
            "values": list(self.values),
            **({"repeats": list(self.repeats)} if self.repeats else {}),
        }


def figures_as_dict(figures: Mapping[str, Figure]) -> dict[str, Any]:
    return {name: figure.as_dict() for name, figure in figures.items()}


def rate(unit: str, count: float, seconds: Iterable[float]) -> Figure:
    """So many of something a second, from the seconds that each repeat took for `count` of them."""
    return Figure(unit, tuple(count / one for one in seconds))


def joined(processes: Sequence[Mapping[str, Figure]]) -> dict[str, Figure]:
    """The figures that all processes have, with the values of all of them."""
    first, *others = processes
    return {
        name: Figure(
            first[name].unit,
            tuple(value for figures in processes for value in figures[name].values),
            tuple(len(figures[name].values) for figures in processes),
        )
        for name in first
        if all(name in figures for figures in others)
    }


def read_result(path: str) -> dict[str, Any]:
    """What an earlier run wrote with --json. Raises UsageError for a file that is not that."""
    try:
        result = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; expected the --json file of a run") from None
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict) or result.get("k3mlx_bench") != FORM:
        raise UsageError(
            f"{path}: not a result of k3mlx bench of form {FORM}; make it with bench --json {path}"
        )
    return result


def figures_of(result: Mapping[str, Any], path: str) -> dict[str, Figure]:
    """The figures of a result that was read. Raises UsageError for a damaged one."""
    try:
        return {name: _figure(figure) for name, figure in result["figures"].items() if figure["values"]}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UsageError(f"{path}: its figures are damaged; expected a unit and values for each") from None


def _figure(figure: Mapping[str, Any]) -> Figure:
    values = tuple(float(value) for value in figure["values"])
    repeats = tuple(int(count) for count in figure.get("repeats", ()))
    if repeats and (min(repeats) < 1 or sum(repeats) != len(values)):
        raise ValueError(f"{len(values)} values of processes with {repeats}")
    return Figure(str(figure["unit"]), values, repeats)
