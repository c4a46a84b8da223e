"""Reads dense tensors in pieces with several threads, past the page cache if asked, and puts each where it belongs.

A piece comes into aligned memory of its thread and is copied, widened or rounded from there, while other threads
read on. Owns threads, pieces and the conversion of numbers; where a tensor goes is the caller's.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .checkpoint.safetensors import NUMPY_DTYPES, FileStamp, TensorInfo
from .checkpoint.snapshot import Checkpoint
from .experts.files import ExpertFiles
from .experts.slots import ALIGN, round_up

PIECE = 8 << 20  # bytes of a read: as good as an expert's, and small enough for all threads to end together
STAGING = 64 << 20  # bytes that all threads together read into

Put = Callable[
    [int, NDArray], None
]  # where in the tensor, counted in numbers, and its numbers from there on [n]
Job = Callable[[], None]


@dataclass(frozen=True)
class Read:
    """A stored tensor and who takes it, in pieces of whole `unit`s of numbers, from any thread and in any order."""

    info: TensorInfo
    put: Put
    unit: int = 1


@dataclass
class Work:
    """What a layer needs: tensors to be read, and values that are to be had in another way."""

    reads: list[Read] = field(default_factory=list)
    others: list[Job] = field(default_factory=list)


class DenseReads:
    """`threads` reads at a time, and as many pieces being converted beside them.

    Threads and files exist from the first work until `close`, and again if there is more.
    """

    def __init__(self, stamps: Mapping[Path, FileStamp], threads: int, direct: bool) -> None:
        self._threads = threads
        self._piece = max(1 << 20, min(PIECE, STAGING // (2 * threads)))
        self._files = ExpertFiles(stamps, direct)
        self._reading = threading.Semaphore(threads)
        self._local = threading.local()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, work: Work) -> None:
        """Do it all. Raises ModelFilesError, or what else the first failure was, when nothing is under way any more."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2 * self._threads, "k3mlx-dense")
        reads = sorted(work.reads, key=lambda read: (str(read.info.path), read.info.offset))
        jobs = [job for read in reads for job in self._pieces(read)]
        futures = [self._pool.submit(job) for job in (*jobs, *work.others)]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._files.close()

    def _pieces(self, read: Read) -> Iterator[Job]:
        item = NUMPY_DTYPES[read.info.dtype].itemsize
        count = read.info.nbytes // item
        step = max(1, self._piece // (item * read.unit)) * read.unit
        for first in range(0, count, step):
            yield lambda first=first: self._read(read, first, min(step, count - first))  # type: ignore[misc]

    def _read(self, read: Read, first: int, count: int) -> None:
        dtype = NUMPY_DTYPES[read.info.dtype]
        offset, nbytes = read.info.offset + first * dtype.itemsize, count * dtype.itemsize
        memory = self._memory(nbytes)
        with self._reading:
            self._files.read(read.info.path, offset, nbytes, memory)
        shift = offset % ALIGN
        read.put(first, memory[shift : shift + nbytes].view(dtype))

    def _memory(self, nbytes: int) -> NDArray[np.uint8]:
        """This thread's own, for any read of so many bytes."""
        memory: NDArray[np.uint8] | None = getattr(self._local, "memory", None)
        size = round_up(nbytes) + ALIGN
        if memory is None or memory.size < size:
            memory = self._local.memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        return memory


def into(out: NDArray) -> Put:
    """Takes a whole tensor into a contiguous array of its numbers."""
    flat = out.reshape(-1)

    def put(first: int, stored: NDArray) -> None:
        convert(stored, flat[first : first + stored.size])

    return put


def convert(stored: NDArray, out: NDArray) -> None:
    """Stored numbers (BF16 as uint16, F16 or F32) as they are, widened, or rounded to BF16 where `out` is uint16."""
    if stored.dtype == out.dtype:
        out[...] = stored
    elif out.dtype == np.float32 and stored.dtype == np.uint16:
        np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
    elif out.dtype == np.uint16:
        bits = stored.astype(np.float32).view(np.uint32)
        # to nearest, ties to even: half of the last kept place, less one unless that place is odd
        out[...] = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    else:
        out[...] = Checkpoint.widen(stored, out.dtype)


def staging_bytes(largest: int) -> int:
    """What the threads read into, of layers of at most `largest` bytes on disk."""
    return min(STAGING, round_up(largest))
