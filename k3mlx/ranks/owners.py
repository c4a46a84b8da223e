"""Which rank has which expert. A rule without memory, so every rank and every run agrees on it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def owner(layer: int, experts: NDArray[np.intp], size: int) -> NDArray[np.intp]:
    """The rank of each expert: round by id, moved on by one from layer to layer so that no rank has the same ids
    everywhere; each has its share of a layer to within one expert."""
    return (experts + layer) % size


def own(layer: int, experts: Iterable[int], rank: int, size: int) -> list[int]:
    """Those of `experts` that `rank` has, in their order."""
    given = np.fromiter(experts, np.intp)
    return given[owner(layer, given, size) == rank].tolist()
