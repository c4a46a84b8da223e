"""Routed experts on demand: the bytes of an expert, a cache of them within a budget, their decoding.

Bytes are kept as stored (MXFP4 packed and scales, or plain floats) and decoded at each use, so the
cache never changes a result. Knows nothing of routing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from k3mlx.checkpoint.mxfp4 import decode
from k3mlx.checkpoint.snapshot import Checkpoint

RawExpert = dict[str, np.ndarray]  # "w1.weight_packed" -> bytes as stored, and so on


@dataclass
class ExpertCounters:
    """What the cache did. Byte counts are payload bytes of whole experts."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0
    evictions: int = 0


class ExpertStore:
    """The routed experts of a checkpoint, least recently used ones dropped beyond `budget` bytes.

    `budget` None keeps whatever has been read. One thread at a time.
    """

    policy = "lru"

    def __init__(self, checkpoint: Checkpoint, budget: int | None, dtype: np.dtype) -> None:
        self.checkpoint = checkpoint
        self.budget = budget
        self.dtype = dtype
        self.counters = ExpertCounters()
        self._cache: OrderedDict[tuple[int, int], RawExpert] = OrderedDict()
        self._cached_bytes = 0

    def fetch(
        self, layer: int, experts: Iterable[int]
    ) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Yield (expert, (w1 [F, L], w2 [L, F], w3 [F, L])) in the given order, in the store's dtype.

        Raises ModelFilesError when the bytes cannot be read.
        """
        for expert in experts:
            raw = self._raw(layer, int(expert))
            yield int(expert), (self._matrix(raw, "w1"), self._matrix(raw, "w2"), self._matrix(raw, "w3"))

    def report(self) -> dict[str, Any]:
        """The `experts` part of a run's report (nothing is prefetched; reads go through the page cache)."""
        return {
            **asdict(self.counters),
            "prefetch_useful_bytes": 0,
            "prefetch_wasted_bytes": 0,
            "policy": self.policy,
            "direct_io": False,
        }

    def close(self) -> None:
        """Give the cached bytes back."""
        self._cache.clear()
        self._cached_bytes = 0

    def _raw(self, layer: int, expert: int) -> RawExpert:
        key = layer, expert
        if key in self._cache:
            self.counters.hits += 1
            self._cache.move_to_end(key)
            return self._cache[key]
        started = perf_counter()
        raw: RawExpert = {}
        for span in self.checkpoint.expert_spans(layer, expert):
            raw |= self.checkpoint.read_span(span)
        size = sum(array.nbytes for array in raw.values())
        self.counters.misses += 1
        self.counters.bytes_read += size
        self.counters.wait_seconds += perf_counter() - started
        self._make_room(size)
        if self.budget is None or size <= self.budget:
            self._cache[key] = raw
            self._cached_bytes += size
        return raw

    def _make_room(self, size: int) -> None:
        while self._cache and self.budget is not None and self._cached_bytes + size > self.budget:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= sum(array.nbytes for array in dropped.values())
            self.counters.evictions += 1

    def _matrix(self, raw: RawExpert, matrix: str) -> np.ndarray:
        if self.checkpoint.mxfp4:
            return decode(raw[f"{matrix}.weight_packed"], raw[f"{matrix}.weight_scale"], self.dtype)
        return self.checkpoint.widen(raw[f"{matrix}.weight"], self.dtype)
