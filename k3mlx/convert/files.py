"""Writing many files with several workers, each complete or not there, with a hash of its bytes.

Knows nothing of what is in them: a target says what it holds and gives its data piece by piece.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.manifest import FileIdentity, WrittenFile
from k3mlx.checkpoint.safetensors import ITEMSIZES
from k3mlx.checkpoint.writer import encode_header, replacing

from . import folders

ALIGN = 4096  # data start at a whole disk block
READ = 8 << 20  # bytes hashed at a time

Entry = tuple[str, str, tuple[int, ...]]  # a tensor: name, dtype, shape
Write = Callable[[NDArray], None]


class Target(NamedTuple):
    """A safetensors file to be written: `produce(write)` gives all data in order and returns relative errors."""

    path: Path
    head: bytes
    size: int
    produce: Callable[[Write], dict[str, float]]

    @classmethod
    def of(cls, path: Path, entries: Iterable[Entry], produce: Callable[[Write], dict[str, float]]) -> Target:
        """A file with these tensors (name, dtype, shape), end to end."""
        listed = list(entries)
        head = _aligned(encode_header(listed))
        data = sum(math.prod(shape) * ITEMSIZES[dtype] for _, dtype, shape in listed)
        return cls(path, head, len(head) + data, produce)

    def identity(self) -> FileIdentity:
        """What the written file will be told by."""
        return FileIdentity(self.path.name, self.size, hashlib.sha256(self.head).hexdigest())


def finished(
    targets: Sequence[Target], records: Mapping[str, WrittenFile], workers: int
) -> dict[str, WrittenFile]:
    """The records, by name, of those files that are there with the bytes that were written."""

    def intact(target: Target) -> bool:
        record = records.get(target.path.name)
        return record is not None and record.size == target.size and _hash(target.path) == record.sha256

    with ThreadPoolExecutor(workers, "k3mlx-check") as pool:
        return {
            target.path.name: records[target.path.name]
            for target, there in zip(targets, pool.map(intact, targets), strict=True)
            if there
        }


def write_all(
    targets: Sequence[Target],
    workers: int,
    done: Callable[[Target, WrittenFile], None],
    progress: Callable[[int, int], None],
) -> None:
    """Write every target; `done` is called for each by this thread. The first failure stops all workers."""
    meter = _Meter(sum(target.size for target in targets), progress)
    with ThreadPoolExecutor(workers, "k3mlx-convert") as pool:
        running = {pool.submit(_write, target, meter): target for target in targets}
        try:
            while running:
                ready, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in sorted(ready, key=lambda future: future.exception() is not None):
                    done(running.pop(future), future.result())
                meter.tell()
        except BaseException:
            meter.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class _Stopped(Exception):
    """Another worker has failed, or the run was interrupted."""


class _Meter:
    """Bytes written so far by all workers, and whether they are to stop."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self.stop = threading.Event()
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._progress = progress

    def count(self, nbytes: int) -> None:
        if self.stop.is_set():
            raise _Stopped
        with self._lock:
            self._done += nbytes

    def tell(self) -> None:
        self._progress(self._done, self._total)


def _write(target: Target, meter: _Meter) -> WrittenFile:
    digest = hashlib.sha256()
    with folders.reported(target.path), replacing(target.path) as file:

        def write(array: NDArray) -> None:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            meter.count(len(data))
            file.write(data)
            digest.update(data)

        write(np.frombuffer(target.head, np.uint8))
        errors = target.produce(write)
        assert file.tell() == target.size, f"{target.path}: {file.tell()} bytes, expected {target.size}"
        file.flush()
        os.fsync(file.fileno())  # the manifest must not know of it before the disk does
    return WrittenFile(target.path.name, target.size, digest.hexdigest(), errors)


def _hash(path: Path) -> str | None:
    """sha256 of a file, None if it is not there."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while data := file.read(READ):
                digest.update(data)
    except OSError:
        return None
    return digest.hexdigest()


def _aligned(head: bytes) -> bytes:
    """A file's head with spaces behind its JSON, so that the data begin at a multiple of ALIGN."""
    text = head[8:] + b" " * (-len(head) % ALIGN)
    return len(text).to_bytes(8, "little") + text
