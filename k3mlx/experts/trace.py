"""A file of what the routers chose, for replaying cache policies: written while running, read back line by line.

One JSON object a line: first the model's sizes, then for each layer of each pass its number and the ids
[T, k]. Knows no policy.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import ModelFilesError, UsageError

LINE_MAX = 64 << 20  # characters


class Routing(NamedTuple):
    """What one layer chose in one pass: ids [T, k]."""

    layer: int
    ids: NDArray[np.intp]


class TraceWriter:
    """Writes a trace. Raises UsageError when the file cannot be created."""

    def __init__(self, path: str | Path, experts: int, per_token: int) -> None:
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise UsageError(f"--expert-trace {path}: cannot be written ({error.strerror})") from None
        self._lock = threading.Lock()
        self._write({"experts": experts, "per_token": per_token})

    def record(self, layer: int, ids: NDArray[np.intp]) -> None:
        self._write({"layer": layer, "ids": ids.tolist()})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, object]) -> None:
        with self._lock:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_trace(path: str | Path) -> tuple[dict[str, int], Iterator[Routing]]:
    """The sizes in a trace's first line, and its routings in order. Raises ModelFilesError for anything else."""
    lines = _lines(Path(path))
    sizes = next(lines, None)
    if not isinstance(sizes, dict) or not all(type(sizes.get(k)) is int for k in ("experts", "per_token")):
        raise ModelFilesError(f"{path}: not a trace of experts (its first line gives no sizes)")
    return sizes, _routings(path, lines)


def _routings(path: str | Path, lines: Iterator[object]) -> Iterator[Routing]:
    for number, line in enumerate(lines, 2):
        try:
            layer, ids = line["layer"], np.array(line["ids"], np.intp)  # type: ignore[index]
        except (TypeError, KeyError, ValueError):
            layer, ids = None, np.zeros(0, np.intp)
        if type(layer) is not int or ids.ndim != 2:
            raise ModelFilesError(f"{path}: line {number} is no routing, expected layer and ids")
        yield Routing(layer, ids)


def _lines(path: Path) -> Iterator[object]:
    try:
        with open(path, encoding="utf-8") as file:
            while text := file.readline(LINE_MAX):
                yield json.loads(text)
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path}: not a trace of experts ({error})") from None
