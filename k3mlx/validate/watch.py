"""Both sides of a stage meet here: what one path showed is kept, what the other shows is compared at once.

Owns the bookkeeping of a layer (order of stages, worst result of each, those that were not shown).
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3mlx.reference.ops import sigmoid

from .compare import StageResult, by_rising_id, compare, compare_ids, row_size, worse


class LayerWatch:
    """The stages of one layer (None: what lies outside the layers), over all pieces of the prompt.

    wanted: whether a stage is to be compared. token: the one position that counts, None for all. bias: what the
    router adds to its scores [E], for layers that have one.
    """

    def __init__(
        self,
        layer: int | None,
        tolerance: float,
        wanted: Callable[[str], bool] = lambda stage: True,
        token: int | None = None,
        bias: NDArray | None = None,
    ) -> None:
        self.layer = layer
        self._prefix = "" if layer is None else f"layers.{layer}."
        self._tolerance = tolerance
        self._wanted = wanted
        self._token = token
        self._bias = bias
        self._worst: dict[str, StageResult] = {}
        self._sizes: dict[str, float] = {}
        self._expected: dict[str, NDArray[Any]] = {}
        self._order: dict[str, None] = {}
        self._first = self._count = 0
        self._ids: NDArray[Any] | None = None

    def begin(self, first: int, count: int) -> None:
        """The next piece: `count` tokens from position `first` on."""
        self._first, self._count = first, count
        self._expected = {}

    def keep(self, stage: str, array: NDArray[Any]) -> None:
        """A stage of the path that is compared with."""
        self._order[stage.removeprefix(self._prefix)] = None
        self._expected[stage] = array

    @property
    def expected(self) -> dict[str, NDArray[Any]]:
        """The stages of this piece, to go on with in the other path."""
        return self._expected

    def judge(self, stage: str, array: NDArray[Any]) -> None:
        """A stage of the path that is tried."""
        short = stage.removeprefix(self._prefix)
        expected = self._expected.get(stage)
        if short == "moe.ids":
            self._ids = array
        if expected is None or not self._wanted(short) or not self._here():
            return
        if short == "moe.weights":
            array, expected = self._aligned(array, expected)
        size = self._sizes.setdefault(short, row_size(short, expected))  # of the first piece, the longest
        rows = self._rows(short, array)
        first = self._first + (rows.start or 0)
        if short == "moe.ids":
            assert self.layer is not None
            result = compare_ids(self.layer, array[rows], expected[rows], self._biased()[rows], first)
        else:
            result = compare(self.layer, short, array[rows], expected[rows], self._tolerance, first, size)
        self._worst[short] = worse(self._worst.get(short), result)

    def results(self) -> list[StageResult]:
        """The worst of each stage that was compared, in the order of computation."""
        return [self._worst[stage] for stage in self._order if stage in self._worst]

    def unseen(self) -> list[str]:
        """Stages that the tried path did not show: those within a kernel."""
        return [stage for stage in self._order if self._wanted(stage) and stage not in self._worst]

    def _here(self) -> bool:
        return self._token is None or 0 <= self._token - self._first < self._count

    def _rows(self, stage: str, array: NDArray[Any]) -> slice:
        if self._token is None or len(array) != self._count or stage in ("kda.windows", "kda.state"):
            return slice(None)
        row = self._token - self._first
        return slice(row, row + 1)

    def _biased(self) -> NDArray[np.float64]:
        assert self._bias is not None, "a layer with a router has a bias"
        logits = self._expected[f"{self._prefix}moe.logits"].astype(np.float64)
        return sigmoid(logits) + self._bias

    def _aligned(self, array: NDArray[Any], expected: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Both by rising id; a token that took other experts has been judged by them and counts as equal."""
        right = self._expected[f"{self._prefix}moe.ids"]
        if self._ids is None or self._ids.shape != right.shape or array.shape != expected.shape:
            return array, expected
        expected = by_rising_id(right, expected)
        same = (np.sort(self._ids, axis=-1) == np.sort(right, axis=-1)).all(axis=-1)
        return np.where(same[:, None], by_rising_id(self._ids, array), expected), expected


def stage_filter(patterns: str | None) -> Callable[[str], bool]:
    """Whether a stage is among comma-separated patterns such as `kda.*,moe.weights`; None is all."""
    if patterns is None:
        return lambda stage: True
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    return lambda stage: any(fnmatchcase(stage, pattern) for pattern in wanted)
