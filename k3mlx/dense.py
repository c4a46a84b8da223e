"""Dense weights that do not all fit: some layers stay, the others are read ahead of each use and dropped.

The use of layers is cyclic, so which ones stay is fixed when the model is loaded. Owns the order;
what a layer's weights are, and how they are read, is the caller's. Same bytes, same results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, Generic, TypeVar, overload

from .checkpoint.names import TensorSpec, layer_specs
from .checkpoint.snapshot import Checkpoint
from .ranks.part import Part

T = TypeVar("T")
Begin = Callable[[int], Callable[[], T]]  # prepares a layer; the result reads it


class LayerRing(Sequence[T], Generic[T]):
    """Layers by number: those of `resident` are loaded once, any other when it is next in turn.

    One of the others is in use, until the next is asked for, and one is being read: two must fit beside the
    resident ones. `begin(n)` is called by the thread that asks, the function that it returns by that thread for
    resident layers and by one of this object for others; `drop(n)` when such a layer is no longer in use, could
    not be read, or nobody came for it. `sizes` are bytes on disk. Without `ahead` nothing is read before it is
    asked for, and one layer must fit beside the resident ones. One thread asks.
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
            if not future.cancel():
                future.exception()  # waits: nothing is read into memory that is given back
            self._drop(unwanted)
        future = self._ahead[1] if self._ahead is not None else self._submit(layer)
        self._ahead = None
        try:
            weights = future.result()
        except Exception:
            self._drop(layer)
            raise
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


def stored_sizes(checkpoint: Checkpoint, part: Part | None = None) -> tuple[int, ...]:
    """Bytes on disk of each layer without its routed experts, or those that are read for a part of it."""

    def size(spec: TensorSpec) -> int:
        stored = checkpoint.tensors[spec.name].nbytes
        return stored if part is None else part.bytes_read(spec, stored)

    config = checkpoint.config
    return tuple(sum(map(size, layer_specs(config, n))) for n in range(config.num_hidden_layers))
