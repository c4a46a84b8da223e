"""What a token costs at a context length: attention of each kind of layer, and the bytes that it keeps.

The state of a long context is made up (random numbers of its shape), so a length needs no prompt. Owns the states,
the times by kind of layer, and the line through them. Beyond the measured lengths sizes are computed, times are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from k3mlx.clock import Clock
from k3mlx.config import ModelConfig
from k3mlx.engine import Engine
from k3mlx.errors import UsageError
from k3mlx.needs import state_bytes
from k3mlx.reference.model import Hooks

from .result import Figure

KINDS = ("kda", "mla")
LONGEST = 1 << 20  # tokens that sizes are computed for
WARM_UP = 3  # rounds: they read experts, and their states grow


@dataclass(frozen=True)
class Line:
    """Seconds = start + slope x tokens, by least squares; `fit` is R², 1 for points on the line."""

    start: float
    slope: float
    fit: float


def measure_context(engine: Engine, lengths: Sequence[int], repeats: int) -> dict[str, Figure]:
    """Milliseconds of attention in one layer of each kind (their mean where there are more), at each length.

    WARM_UP rounds that do not count, then `repeats`, each with all lengths in turn, so that a busy moment hits all of
    them alike.
    On MLX a layer's attention is evaluated with its router and with what the layer before has left undone.
    Raises UsageError for a length that the model does not have.
    """
    most = engine.config.max_position_embeddings - repeats - WARM_UP - 1
    if wrong := [length for length in lengths if not 0 < length <= most]:
        raise UsageError(f"context of {wrong[0]} tokens, expected 1 to {most}")
    backend = engine.backend
    states = {length: _made_up(engine, length) for length in sorted(set(lengths))}
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(-WARM_UP, repeats):
        for length in states:
            seconds, states[length] = _step(engine, states[length])
            for kind in KINDS:
                mine = [s for s, k in zip(seconds, backend.config.layer_kinds, strict=True) if k == kind]
                if mine and turn >= 0:
                    times.setdefault((kind, length), []).append(1e3 * sum(mine) / len(mine))
    return {context_name(kind, n): Figure("ms/layer", tuple(values)) for (kind, n), values in times.items()}


def context_name(kind: str, length: int) -> str:
    """The name of the figure."""
    return f"context_{kind}_{length}"


def context_points(figures: dict[str, Figure], kind: str) -> list[tuple[int, float]]:
    """(tokens, median milliseconds) of a kind of layer, by rising length."""
    prefix = context_name(kind, 0).removesuffix("0")
    found = [(name, figure) for name, figure in figures.items() if name.startswith(prefix)]
    return sorted((int(name.removeprefix(prefix)), figure.median) for name, figure in found)


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """The line with the least squares through at least two points."""
    x, y = np.array(points, np.float64).T
    slope, start = np.polyfit(x, y, 1)
    left, whole = np.sum((start + slope * x - y) ** 2), np.sum((y - y.mean()) ** 2)
    return Line(float(start), float(slope), float(1 - left / whole) if whole else 1.0)


def state_sizes(
    config: ModelConfig, lengths: Sequence[int], item: int, kda_item: int
) -> list[dict[str, int]]:
    """Bytes of one layer's state by length: KDA's, which is one size, and MLA's cache."""
    kinds = config.layer_kinds
    kda = state_bytes(config, 0, item, kda_item) // max(1, kinds.count("kda"))
    rows = state_bytes(config, 1, item, kda_item) - state_bytes(config, 0, item, kda_item)
    mla = rows // max(1, kinds.count("mla"))
    return [{"tokens": length, "kda": kda, "mla": length * mla} for length in lengths]


def lengths_beyond(lengths: Sequence[int]) -> list[int]:
    """Those given, and their longest doubled up to LONGEST."""
    found = sorted(set(lengths))
    while 2 * found[-1] <= LONGEST:
        found.append(2 * found[-1])
    return found


def spread_of(points: Sequence[tuple[int, float]]) -> float:
    """From the least to the most, in parts of the median: how flat."""
    values = [value for _, value in points]
    return (max(values) - min(values)) / median(values)


def _made_up(engine: Engine, length: int) -> Any:
    """A state as after `length` tokens; numbers of the size that norms and gates leave."""
    rng = np.random.default_rng(length)
    arrays = {}
    for name, array in engine.backend.export_state(engine.backend.new_state()).items():
        shape = (length, array.shape[1]) if name.endswith(".latents") else array.shape
        scale = 0.05 if name.endswith(".state") else 1.0
        numbers = rng.standard_normal(shape, np.float32) * np.float32(scale)
        arrays[name] = numbers.astype(array.dtype, copy=False)
    return engine.backend.import_state(arrays, length)


def _step(engine: Engine, state: Any) -> tuple[list[float], Any]:
    """Seconds of attention in each layer for one more token, and the state after it."""
    clock, marks = Clock(), []

    def before_layer(layer: int) -> None:
        marks.append(clock.seconds.get("attention", 0.0))

    _, after = engine.backend.forward([1], state, False, Hooks(before_layer, clock=clock, settled=True))
    marks.append(clock.seconds.get("attention", 0.0))
    return [end - start for start, end in pairwise(marks)], after
