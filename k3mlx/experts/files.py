"""Positioned reads of expert bytes into slots, direct or through the page cache, from many threads.

Direct reads take whole aligned blocks around the wanted bytes, the end of a file that is no whole block
comes through the page cache. Every read checks that the file is still the one that was opened. Knows
nothing of experts; does not retry.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.layout import check_link
from k3mlx.checkpoint.safetensors import HEADER_MAX, FileStamp
from k3mlx.checkpoint.untrusted import reason, stat_file
from k3mlx.errors import ModelFilesError

from .slots import ALIGN, round_up

READ_MAX = 1 << 30  # some systems refuse a read of 2 GiB or more
SLICE = 4 << 20  # a read that may be given up asks after so many bytes

GiveUp = Callable[[], bool]


def direct_supported() -> bool:
    """Whether this system has reads that bypass the page cache (whether a file system does shows later)."""
    return hasattr(os, "preadv") and (hasattr(os, "O_DIRECT") or sys.platform == "darwin")


class ReadGivenUp(Exception):
    """A read of low priority was stopped on request; its slot holds nothing."""


class ExpertFiles:
    """Open files by path. `direct` may be switched at any time; it holds for reads that start later.

    `copies` are files of equal contents, on other drives, say: a read goes to the device that has least to do.
    """

    def __init__(
        self,
        stamps: Mapping[Path, FileStamp],
        direct: bool = False,
        copies: Mapping[Path, Sequence[Path]] | None = None,
    ) -> None:
        self.stamps = stamps
        self._sources = {path: (path, *others) for path, others in (copies or {}).items()}
        self._load: dict[int, tuple[int, int]] = {}  # device -> bytes asked for and not read, bytes so far
        self.direct = direct
        self._lock = threading.Lock()
        self._files: dict[tuple[Path, bool], _File] = {}

    def read(
        self, path: Path, offset: int, nbytes: int, memory: NDArray[np.uint8], give_up: GiveUp | None = None
    ) -> None:
        """Fill memory[s : s + nbytes] with the file's bytes from `offset`, s = offset mod ALIGN.

        `memory` starts at a multiple of ALIGN and reaches to the next one after the read. Raises
        ModelFilesError when the file has changed, ends early or cannot be read, ReadGivenUp as asked.
        """
        with self._source(path, nbytes) as source:
            self._read(source, offset, nbytes, memory, give_up)

    def _read(
        self, path: Path, offset: int, nbytes: int, memory: NDArray[np.uint8], give_up: GiveUp | None
    ) -> None:
        first, stop = offset - offset % ALIGN, offset + nbytes  # memory[x] is byte first + x
        done = offset
        if self.direct:
            with self._using(path, direct=True) as file:
                done = _read_blocks(file, first, stop, memory, give_up)
        if done < stop:
            with self._using(path, direct=False) as file:
                step = READ_MAX if give_up is None else SLICE
                while done < stop:
                    _check_wanted(give_up)
                    done += file.read(done, memory[done - first : min(done + step, stop) - first])
                file.check()

    def reopen(self, path: Path) -> None:
        """Close a path's descriptors when their reads have ended, so that the next read opens it anew."""
        with self._lock:
            for source in self._sources.get(path, (path,)):
                for direct in (False, True):
                    file = self._files.pop((source, direct), None)
                    if file is not None:
                        file.retired = True
                        file.close_if_idle()

    def close(self) -> None:
        """Close every file; there must be no reads in progress."""
        for path, _ in list(self._files):
            self.reopen(path)

    @contextmanager
    def _source(self, path: Path, nbytes: int) -> Iterator[Path]:
        """The copy to read now: on the device that has the fewest bytes waiting, then the fewest behind it."""
        sources = self._sources.get(path)
        if sources is None:
            yield path
            return
        with self._lock:
            loads = {source: self._load.get(_device(source), (0, 0)) for source in sources}
            chosen = min(sources, key=loads.__getitem__)
            device = _device(chosen)
            waiting, done = loads[chosen]
            self._load[device] = waiting + nbytes, done
        try:
            yield chosen
        finally:
            with self._lock:
                waiting, done = self._load[device]
                self._load[device] = waiting - nbytes, done + nbytes

    @contextmanager
    def _using(self, path: Path, direct: bool) -> Iterator[_File]:
        with self._lock:
            file = self._files.get((path, direct))
            if file is None:
                file = self._files[path, direct] = _File(path, self.stamps.get(path), direct)
            file.readers += 1
        try:
            yield file
        finally:
            with self._lock:
                file.readers -= 1
                file.close_if_idle()


def find_copies(
    stamps: Mapping[Path, FileStamp], folders: Sequence[Path]
) -> tuple[dict[Path, list[Path]], dict[Path, FileStamp]]:
    """Files of the same name and header in other folders: copies by path, and stamps of all of them.

    Raises ModelFilesError for a file of the same name that is another file.
    """
    copies: dict[Path, list[Path]] = {}
    all_stamps = dict(stamps)
    for path, stamp in stamps.items():
        for folder in folders:
            other = folder / path.name
            if other == path or not other.exists():
                continue
            check_link(folder, other)
            status = stat_file(other)
            if status.st_size != stamp.size or _head(other) != _head(path):
                raise ModelFilesError(
                    f"{other}: not a copy of {path} ({status.st_size} bytes, the other has {stamp.size}):"
                    " other contents under the same name"
                )
            copies.setdefault(path, []).append(other)
            all_stamps[other] = FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)
    return copies, all_stamps


def _head(path: Path) -> bytes:
    """A safetensors file's length of header and header."""
    try:
        with open(path, "rb") as file:
            length = file.read(8)
            return length + file.read(min(HEADER_MAX, int.from_bytes(length, "little")))
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read ({reason(error)})") from None


def _device(path: Path) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return -1


def _read_blocks(
    file: _File, first: int, stop: int, memory: NDArray[np.uint8], give_up: GiveUp | None
) -> int:
    """Read whole blocks from `first` on, as far as the file has them; returns where the rest begins."""
    whole = min(round_up(stop), file.size - file.size % ALIGN if file.blocks else file.size)
    step = READ_MAX if give_up is None else SLICE
    position = first
    while position < whole:
        _check_wanted(give_up)
        position += file.read(position, memory[position - first : min(position + step, whole) - first])
        if position % ALIGN:
            break  # the system stopped short: the rest goes through the page cache
    file.check()
    return min(position, stop)


class _File:
    """One descriptor and how many reads use it; guarded by the lock of its ExpertFiles."""

    def __init__(self, path: Path, expected: FileStamp | None, direct: bool) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.readers = 0
        self.retired = False
        self.blocks = direct and hasattr(os, "O_DIRECT")  # reads must be of whole blocks
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            self._descriptor = os.open(path, flags | (os.O_DIRECT if self.blocks else 0))
        except OSError as error:
            raise ModelFilesError(f"{path}: cannot be opened ({reason(error)})") from None
        try:
            if direct and sys.platform == "darwin":
                import fcntl

                fcntl.fcntl(self._descriptor, fcntl.F_NOCACHE, 1)
            self._expected = expected or self._stamp()
            self.size = self._expected.size
            self.check()
        except BaseException:
            os.close(self._descriptor)
            raise

    def close_if_idle(self) -> None:
        if self.retired and not self.readers:
            os.close(self._descriptor)

    def check(self) -> None:
        """Raise ModelFilesError unless the open file is as it was when the model was opened."""
        stamp = self._stamp()
        if stamp != self._expected:
            raise ModelFilesError(
                f"{self._path}: changed since the model was opened ({stamp.size} bytes,"
                f" was {self._expected.size}); open it again"
            )

    def _stamp(self) -> FileStamp:
        status = os.fstat(self._descriptor)
        return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)

    def read(self, offset: int, memory: NDArray[np.uint8]) -> int:
        """Read at most `len(memory)` bytes and return how many, at least one."""
        try:
            count = self._read_some(offset, memory.data)
        except OSError as error:
            raise ModelFilesError(
                f"{self._path}: reading {memory.size} bytes at {offset} failed ({reason(error)})"
            ) from None
        if count == 0:
            raise ModelFilesError(
                f"{self._path}: ends at byte {offset}, {memory.size} bytes of a read are missing:"
                " cut since the model was opened"
            )
        return count

    def _read_some(self, offset: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [view], offset)
        with self._lock:
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            data = os.read(self._descriptor, min(len(view), SLICE))
        view[: len(data)] = data
        return len(data)


def _check_wanted(give_up: GiveUp | None) -> None:
    if give_up is not None and give_up():
        raise ReadGivenUp
