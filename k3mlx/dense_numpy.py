"""The dense tensors of a layer as numpy arrays, read at once; those of streamed layers in memory that is used again.

Gives what `Checkpoint.load` gives. Owns that memory; when a layer is read and dropped is `dense.LayerRing`'s.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .checkpoint.names import TensorSpec, layer_specs
from .checkpoint.snapshot import Checkpoint
from .config import ModelConfig
from .dense_memory import Arena, Place, padded
from .dense_reads import DenseReads, Read, Work, into
from .errors import K3Error

_PLAIN = ("BF16", "F16", "F32")


class DenseReader:
    """Reads all dense tensors of a layer, with several threads, past the page cache if asked.

    `streamed` layers, of which `at_once` are in memory, share a region for them; `keep` those of no other.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        threads: int,
        direct: bool,
        dtype: DTypeLike,
        streamed: Collection[int] = (),
        at_once: int = 2,
    ) -> None:
        self._checkpoint = checkpoint
        self._reads = DenseReads(checkpoint.stamps, threads, direct)
        self._dtype = np.dtype(dtype)
        self._streamed = frozenset(streamed)
        sizes = sorted(sum(padded(self._nbytes(spec)) for spec in self._specs(n)) for n in streamed)
        self._arena = Arena(sum(sizes[-at_once:]))
        self._region = _region(self._arena.size)
        self._lent: dict[int, list[Place]] = {}

    def layer(self, layer: int) -> LoadedTensors:
        """The tensors of a layer as `Checkpoint.load` gives them; of a streamed one until `drop`.

        Raises ModelFilesError.
        """
        work, arrays = Work(), {}
        lent = self._lent.setdefault(layer, []) if layer in self._streamed else None
        for spec in sorted(self._specs(layer), key=self._nbytes, reverse=True):
            info = self._checkpoint.tensors[spec.name]
            if info.dtype in _PLAIN and not spec.name.endswith(".A_log"):
                arrays[spec.name] = self._empty(info.shape, lent)
                work.reads.append(Read(info, into(arrays[spec.name])))
            else:
                work.others.append(lambda name=spec.name: arrays.update({name: self._load(name)}))  # type: ignore[misc]
        self._reads.run(work)
        return LoadedTensors(self._checkpoint.config, arrays)

    def drop(self, layer: int) -> None:
        """Use the memory of a layer for others: nobody computes with it any more, and nothing reads into it."""
        self._arena.give(self._lent.pop(layer, ()))

    def close(self) -> None:
        """Let go of threads and files; more reads have them anew."""
        self._reads.close()

    def _specs(self, layer: int) -> list[TensorSpec]:
        return list(layer_specs(self._checkpoint.config, layer))

    def _nbytes(self, spec: TensorSpec) -> int:
        return math.prod(spec.shape) * self._dtype.itemsize

    def _load(self, name: str) -> NDArray:
        return self._checkpoint.load(name, self._dtype)

    def _empty(self, shape: tuple[int, ...], lent: list[Place] | None) -> NDArray:
        place = None if lent is None else self._arena.take(math.prod(shape) * self._dtype.itemsize)
        if place is None or lent is None:
            return np.empty(shape, self._dtype)
        lent.append(place)
        memory = self._region[place.start : place.stop].view(self._dtype)
        return memory[: math.prod(shape)].reshape(shape)


class LoadedTensors:
    """Tensors in memory under the interface of a checkpoint; each is handed out once."""

    def __init__(self, config: ModelConfig, arrays: dict[str, NDArray]) -> None:
        self.config = config
        self._arrays = arrays

    def load(self, name: str, dtype: Any = np.float32) -> NDArray:
        array = self._arrays.pop(name)
        if array.dtype != dtype:
            raise K3Error(f"{name} was loaded as {array.dtype}, expected {np.dtype(dtype)}")
        return array


def _region(nbytes: int) -> NDArray[np.uint8]:
    """Memory whose pages are large where the system has such: there are fewer to be had at the first pass."""
    if not nbytes:
        return np.empty(0, np.uint8)
    region = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)
