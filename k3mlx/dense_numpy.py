"""The dense tensors of a layer as numpy arrays, read at once; those of streamed layers in memory that is used again.

Gives what `Checkpoint.load` gives, or with kernels matrices as they are stored. Owns that memory; when a layer is read
and dropped is `dense.LayerRing`'s.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .checkpoint.names import TensorSpec, dense_specs, layer_specs
from .checkpoint.safetensors import NUMPY_DTYPES
from .checkpoint.snapshot import Checkpoint
from .config import ModelConfig
from .dense_memory import Arena, Place, enough, padded
from .dense_native import linear, stored_format, stored_parts
from .dense_reads import DenseReads, Read, Work, into
from .errors import K3Error
from .kernels.cpu import CpuKernels

_PLAIN = ("BF16", "F16", "F32")


class DenseReader:
    """Reads all dense tensors of a layer, with several threads, past the page cache if asked.

    `streamed` layers, of which `at_once` are in memory, share a region for them. With `kernels` a matrix that they can
    multiply with as it is stored is not widened (`dense_native.stored_format`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        threads: int,
        direct: bool,
        dtype: DTypeLike,
        streamed: Collection[int] = (),
        at_once: int = 2,
        kernels: CpuKernels | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._reads = DenseReads(checkpoint.stamps, threads, direct)
        self._dtype = np.dtype(dtype)
        self._kernels = kernels
        self._streamed = frozenset(streamed)
        self._arena = Arena(
            enough([list(map(self._room, layer_specs(checkpoint.config, n))) for n in streamed], at_once)
        )
        self._region = _region(self._arena.size)
        self._lent: dict[int, list[Place]] = {}

    def layer(self, layer: int) -> LoadedTensors:
        """The tensors of a layer as `Checkpoint.load` gives them; of a streamed one until `drop`.

        Raises ModelFilesError.
        """
        lent = self._lent.setdefault(layer, []) if layer in self._streamed else None
        return self._loaded(list(layer_specs(self._checkpoint.config, layer)), lent)

    def outer(self) -> LoadedTensors:
        """The tensors outside the layers. Raises ModelFilesError."""
        specs = dense_specs(self._checkpoint.config)
        return self._loaded([spec for spec in specs if not spec.name.startswith("model.layers.")], None)

    def drop(self, layer: int) -> None:
        """Use the memory of a layer for others: nobody computes with it any more, and nothing reads into it."""
        self._arena.give(self._lent.pop(layer, ()))

    def close(self) -> None:
        """Let go of threads and files; more reads have them anew."""
        self._reads.close()

    def _loaded(self, specs: list[TensorSpec], lent: list[Place] | None) -> LoadedTensors:
        work = Work()
        arrays: dict[str, Any] = {}
        stored: dict[str, list[NDArray]] = {}
        for spec in sorted(specs, key=self._nbytes, reverse=True):
            name, info = spec.name, self._checkpoint.tensors[spec.name]
            if self._as_stored(spec):
                parts = stored_parts(self._checkpoint, name)
                stored[name] = [self._empty(part.shape, NUMPY_DTYPES[part.dtype], lent) for part in parts]
                work.reads += [
                    Read(part, into(array)) for part, array in zip(parts, stored[name], strict=True)
                ]
            elif info.dtype in _PLAIN and not name.endswith(".A_log"):
                arrays[name] = self._empty(info.shape, self._dtype, lent)
                work.reads.append(Read(info, into(arrays[name])))
            else:
                work.others.append(lambda name=name: arrays.update({name: self._load(name)}))  # type: ignore[misc]
        self._reads.run(work)
        if self._kernels is not None:
            arrays |= {
                name: linear(self._kernels, self._checkpoint, name, parts) for name, parts in stored.items()
            }
        return LoadedTensors(self._checkpoint.config, arrays)

    def _as_stored(self, spec: TensorSpec) -> bool:
        return self._kernels is not None and stored_format(self._checkpoint, spec) is not None

    def _nbytes(self, spec: TensorSpec) -> int:
        return math.prod(spec.shape) * self._dtype.itemsize

    def _room(self, spec: TensorSpec) -> int:
        """Bytes that a tensor takes of the region."""
        if self._as_stored(spec):
            return sum(padded(part.nbytes) for part in stored_parts(self._checkpoint, spec.name))
        return padded(self._nbytes(spec))

    def _load(self, name: str) -> NDArray:
        return self._checkpoint.load(name, self._dtype)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype, lent: list[Place] | None) -> NDArray:
        nbytes = math.prod(shape) * dtype.itemsize
        place = None if lent is None else self._arena.take(nbytes)
        if place is None or lent is None:
            return np.empty(shape, dtype)
        lent.append(place)
        return self._region[place.start : place.start + nbytes].view(dtype).reshape(shape)


class LoadedTensors:
    """Tensors in memory under the interface of a checkpoint; each is handed out once."""

    def __init__(self, config: ModelConfig, arrays: dict[str, Any]) -> None:
        self.config = config
        self._arrays = arrays

    def load(self, name: str, dtype: Any = np.float32) -> Any:
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
