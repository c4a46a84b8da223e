"""How far a stage of one path is from that of another: the measure, the tolerances, the worst element.

An error is |got - expected| over the largest |expected| of the same row (all axes but the first: a token, or a
head of a state), or over what is common for rows of that stage where a row is small throughout: a product's rounding
is that of its terms, and in a short row they may all cancel. Routers are judged by what their choice costs, not by
ids. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Each stage is fed with the expected results of the stages before it, rounded to the path's dtype, so its error is
# that of one stage. Seen on k3-nano, random models and layers of the released widths: float32 3e-6 (numpy) and 9e-6
# (MLX, whose sums on the CPU are plain), bfloat16 1.1e-2.
TOLERANCES = {"float64": 1e-9, "float32": 5e-5, "bfloat16": 4e-2}
TIE = 1e-6  # biased scores, computed in float32 by every path, that close may come in either order
NOT_TOKENS = ("kda.windows", "kda.state")  # stages whose first axis is not the token's


@dataclass(frozen=True)
class StageResult:
    """One stage of one layer, at its worst place. layer is None outside the layers; `at` is an index with the
    position of the token first (for `kda.windows` and `kda.state`: of the array as it is)."""

    layer: int | None
    stage: str
    error: float
    tolerance: float
    at: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """The error in tolerances."""
        return self.error / self.tolerance if self.tolerance else float("inf" if self.error else 0)

    @property
    def name(self) -> str:
        return self.stage if self.layer is None else f"layer {self.layer}, {self.stage}"

    def sentence(self) -> str:
        """What is wrong, on one line."""
        return (
            f"{self.name}{list(self.at)}: got {self.got:.8g}, expected {self.expected:.8g},"
            f" error {self.error:.2e} of the row's largest, tolerance {self.tolerance:.0e}"
        )


def row_size(stage: str, expected: NDArray[Any]) -> float:
    """The largest number of a row that is common in a stage: the median over its tokens, 0 for states."""
    if stage.endswith(NOT_TOKENS) or not expected.size:
        return 0.0
    return float(np.median(np.abs(expected.reshape(len(expected), -1)).max(axis=1)))


def compare(
    layer: int | None, stage: str, got: NDArray[Any], expected: NDArray[Any], tolerance: float,
    first: int = 0, size: float = 0.0,
) -> StageResult:  # fmt: skip
    """The worst element of a stage; `first` is the position of its first token, `size` that of a common row."""
    if got.shape != expected.shape:
        return StageResult(layer, stage, float("inf"), tolerance, got.shape, float("nan"), float("nan"))
    with np.errstate(all="ignore"):
        wide, want = got.astype(np.float64), expected.astype(np.float64)
        sizes = np.abs(want.reshape(len(want), -1)).max(axis=1, initial=max(size, np.finfo(np.float64).tiny))
        error = np.abs(wide - want) / sizes.reshape(-1, *[1] * (want.ndim - 1))
    error[~np.isfinite(wide) | ~np.isfinite(want)] = np.inf
    place = np.unravel_index(int(error.argmax()), error.shape)
    shift = 0 if stage.endswith(NOT_TOKENS) else first
    at = (int(place[0]) + shift, *map(int, place[1:]))
    return StageResult(
        layer, stage, float(error[place]), tolerance, at, float(wide[place]), float(want[place])
    )


def compare_ids(
    layer: int, got: NDArray[Any], expected: NDArray[Any], biased: NDArray[np.float64], first: int
) -> StageResult:
    """Experts chosen, [T, k] each, given the biased scores [T, E] that they should have been chosen by.

    The error is by how much the best expert that was left out scores higher than the worst that was taken. An id that
    is none, or twice there, is an infinite one.
    """
    worst = StageResult(layer, "moe.ids", 0.0, TIE, (first, 0), float(got[0, 0]), float(expected[0, 0]))
    for token, (chosen, right) in enumerate(zip(got.tolist(), expected.tolist(), strict=True)):
        wrong, missing = sorted(set(chosen) - set(right)), sorted(set(right) - set(chosen))
        legal = len(set(chosen)) == len(right) and all(0 <= id < biased.shape[1] for id in chosen)
        if legal and not wrong:
            continue
        id = min(wrong, key=lambda id: biased[token, id]) if legal else chosen[0]
        best = max(missing, key=lambda id: biased[token, id], default=right[0])
        error = float(biased[token, best] - biased[token, id]) if legal else float("inf")
        if error > worst.error:
            at = first + token, chosen.index(id)
            worst = StageResult(layer, "moe.ids", error, TIE, at, float(id), float(best))
    return worst


def by_rising_id(ids: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
    """Weights [T, k] in the order of the ids they belong to, for paths that list experts in another order."""
    return np.take_along_axis(weights, np.argsort(ids, axis=-1, kind="stable"), axis=-1)


def worse(old: StageResult | None, new: StageResult) -> StageResult:
    """The one of two results of the same stage that says more."""
    return new if old is None or new.excess > old.excess else old


def tolerance_for(dtypes: Iterable[str], asked: float | None) -> float:
    """What a stage may differ by between paths of these dtypes."""
    return max(TOLERANCES[dtype] for dtype in dtypes) if asked is None else asked
