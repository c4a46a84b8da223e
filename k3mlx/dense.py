"""Dense weights that do not all fit: some layers stay, the others are read ahead of each use and dropped.

The use of layers is cyclic, so which ones stay is fixed when the model is loaded. Owns the reading and the
order; what a layer's weights are is the caller's. Same bytes, same results.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .checkpoint.names import layer_specs
from .checkpoint.safetensors import NUMPY_DTYPES, TensorInfo
from .checkpoint.snapshot import Checkpoint
from .config import ModelConfig
from .errors import K3Error
from .experts.files import ExpertFiles
from .experts.slots import ALIGN, round_up

T = TypeVar("T")
Begin = Callable[[int], Callable[[], T]]  # prepares a layer; the result reads it
Memory = Callable[[int], NDArray[np.uint8]]  # so many bytes, aligned
_WIDEN = 1 << 16  # numbers widened at a time, in the cache of a core


class LayerRing(Sequence[T], Generic[T]):
    """Layers by number: those of `resident` are loaded once, any other when it is next in turn.

    One of the others is in use, until the next is asked for, and one is being read: two must fit beside the
    resident ones. `begin(n)` is called by the thread that asks, the function that it returns by that thread for
    resident layers and by one of this object for others; `drop(n)` when such a layer is no longer in use.
    `sizes` are bytes on disk. Without `ahead` nothing is read before it is asked for, and one layer must fit beside
    the resident ones. One thread asks.
    """

    def __init__(
        self,
        begin: Begin[T],
        sizes: Sequence[int],
        resident: Collection[int],
        drop: Callable[[int], None] = lambda layer: None,
        ahead: bool = True,
    ) -> None:
        self._begin = begin
        self._drop = drop
        self._sizes = sizes
        self._read_ahead = ahead
        self._kept = {n: begin(n)() for n in sorted(resident)}
        self._streamed = [n for n in range(len(sizes)) if n not in self._kept]
        self._current: tuple[int, T] | None = None
        self._ahead: tuple[int, Future[T]] | None = None
        self._thread = ThreadPoolExecutor(1, "k3mlx-ahead") if self._streamed else None
        self.bytes_read = 0
        self.read_seconds = 0.0
        self.wait_seconds = 0.0

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            raise TypeError("layers are taken one at a time")
        if not 0 <= index < len(self._sizes):
            raise IndexError(index)
        if index in self._kept:
            return self._kept[index]
        if self._current is None or self._current[0] != index:
            if self._current is not None:
                layer, self._current = self._current[0], None
                self._drop(layer)  # its memory is wanted
            self._current = index, self._next(index)
        return self._current[1]

    def resident(self, layer: int) -> T | None:
        """The layer if it is in memory for good."""
        return self._kept.get(layer)

    def report(self) -> dict[str, Any]:
        """What reading layers at each use has cost: bytes, time of the reads, time waited for them."""
        return {
            "bytes_read": self.bytes_read,
            "read_seconds": self.read_seconds,
            "wait_seconds": self.wait_seconds,
        }

    def close(self) -> None:
        """Wait for a read in progress and let go of everything."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._ahead = self._current = None
        self._kept.clear()

    def _next(self, layer: int) -> T:
        """A layer that is read at each use; starts to read the one after it."""
        started = perf_counter()
        if self._ahead is not None and self._ahead[0] != layer:
            unwanted, future = self._ahead  # a pass was abandoned: what was read ahead is of no use now
            self._ahead = None
            if not future.cancel() and future.exception() is None:
                self._drop(unwanted)
        future = self._ahead[1] if self._ahead is not None else self._submit(layer)
        self._ahead = None
        weights = future.result()
        self.wait_seconds += perf_counter() - started
        if self._read_ahead and len(self._streamed) > 1:
            following = self._streamed[(self._streamed.index(layer) + 1) % len(self._streamed)]
            self._ahead = following, self._submit(following)
        return weights

    def _submit(self, layer: int) -> Future[T]:
        assert self._thread is not None, "a layer that is not resident has a thread to read it"
        read = self._begin(layer)

        def run() -> T:
            started = perf_counter()
            weights = read()
            self.read_seconds += perf_counter() - started
            self.bytes_read += self._sizes[layer]
            return weights

        return self._thread.submit(run)


def stored_sizes(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Bytes on disk of each layer without its routed experts."""
    return tuple(
        sum(checkpoint.tensors[spec.name].nbytes for spec in layer_specs(checkpoint.config, n))
        for n in range(checkpoint.config.num_hidden_layers)
    )


class Buffers:
    """Memory for tensors that are read again and again: pages that a process has had are cheap to have again.

    At most `limit` bytes are in use or kept; what is kept in other sizes is let go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            kept = self._free.get(nbytes)
            if kept:
                return kept.pop()
            self._total += nbytes
            while self._total > self._limit and any(self._free.values()):
                size = next(size for size, buffers in self._free.items() if buffers)
                self._free[size].pop()
                self._total -= size
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)

    def give(self, buffers: Iterable[NDArray[np.uint8]]) -> None:
        with self._lock:
            for buffer in buffers:
                self._free.setdefault(buffer.size, []).append(buffer)


class DenseReader:
    """Reads all dense tensors of a layer at once, with several threads, past the page cache if asked.

    `limit` bytes of memory are used again for layers that have been given back by `drop`.
    """

    def __init__(self, checkpoint: Checkpoint, threads: int, direct: bool, limit: int = 0) -> None:
        self._checkpoint = checkpoint
        self._files = ExpertFiles(checkpoint.stamps, direct)
        self._pool = ThreadPoolExecutor(threads, "k3mlx-dense")
        self._buffers = Buffers(limit)
        self._lent: dict[int, list[NDArray[np.uint8]]] = {}

    def layer(self, layer: int, dtype: DTypeLike, keep: bool = True) -> LoadedTensors:
        """The tensors of a layer as `Checkpoint.load` gives them; until `drop` unless `keep`.

        Raises ModelFilesError.
        """
        names = [spec.name for spec in layer_specs(self._checkpoint.config, layer)]
        lent: list[NDArray[np.uint8]] = []

        def memory(nbytes: int) -> NDArray[np.uint8]:
            if keep:
                return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
            lent.append(self._buffers.take(nbytes))
            return lent[-1]

        arrays = self._pool.map(lambda name: self._tensor(name, np.dtype(dtype), memory), names)
        loaded = LoadedTensors(self._checkpoint.config, dict(zip(names, arrays, strict=True)))
        self._lent[layer] = lent
        return loaded

    def drop(self, layer: int) -> None:
        """Use the memory of a layer for others: nobody computes with it any more."""
        self._buffers.give(self._lent.pop(layer, ()))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._files.close()

    def _tensor(self, name: str, dtype: np.dtype, memory: Memory) -> NDArray:
        info = self._checkpoint.tensors[name]
        plain = type(info) is TensorInfo and info.dtype in ("BF16", "F32")
        if not plain or dtype != np.float32 or name.endswith(".A_log"):
            return self._checkpoint.load(name, dtype)
        return read_float32(self._files, info, memory)


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


def read_float32(files: ExpertFiles, info: TensorInfo, memory: Memory) -> NDArray[np.float32]:
    """A BF16 or F32 tensor as float32, read into the memory of the result and widened there.

    `memory(n)` gives n bytes that start at a multiple of ALIGN.
    """
    count = info.nbytes // NUMPY_DTYPES[info.dtype].itemsize
    if count == 0:
        return np.empty(info.shape, np.float32)
    shift = info.offset % ALIGN
    # BF16 bits go to the upper end of twice their size: widened from the front, no bit is overwritten unread
    first = round_up(info.nbytes + 2) if info.dtype == "BF16" else 0
    room = memory(first + round_up(info.nbytes) + ALIGN)
    files.read(info.path, info.offset, info.nbytes, room[first:])
    stored = room[first + shift : first + shift + info.nbytes].view(NUMPY_DTYPES[info.dtype])
    if info.dtype == "F32":
        return stored.reshape(info.shape)
    bits = room[: 4 * count].view(np.uint32)
    scratch = np.empty(min(count, _WIDEN), np.uint32)
    for start in range(0, count, _WIDEN):
        piece = stored[start : start + _WIDEN]
        wide = scratch[: len(piece)]
        np.copyto(wide, piece)
        np.left_shift(wide, 16, out=bits[start : start + _WIDEN])
    return bits.view(np.float32).reshape(info.shape)
