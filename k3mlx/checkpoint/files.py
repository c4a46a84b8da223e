"""Reading bytes at offsets of many files from many threads.

Files are opened on first use and closed together; no thread waits for another where the system has pread.
Knows nothing of tensors.
"""

import io
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import K3Error, ModelFilesError

from .safetensors import FileStamp
from .untrusted import reason

_READ_MAX = 1 << 30  # some systems refuse a read of 2 GiB or more


class FilePool:
    """Files that can be read at any offset; one that has a stamp must still fit it when it is opened."""

    def __init__(self, stamps: Mapping[Path, FileStamp]) -> None:
        self._stamps = stamps
        self._files: dict[Path, _OpenFile] = {}
        self._idle = threading.Condition()
        self._reads = 0
        self._closed = False

    def read_into(self, path: Path, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out`, a contiguous byte array, with the bytes of `path` from `offset` on.

        Raises ModelFilesError when the file has changed since its header was read, ends too early or cannot
        be read, K3Error after `close`.
        """
        if out.size == 0:
            return
        file = self._begin(path)
        try:
            file.read_into(offset, out)
        finally:
            self._end()

    def close(self) -> None:
        """Wait for reads in progress and close every file. Later reads fail."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._reads == 0)
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _begin(self, path: Path) -> "_OpenFile":
        with self._idle:
            if self._closed:
                raise K3Error(f"{path}: read after the checkpoint was closed")
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = _OpenFile(path, self._stamps.get(path))
            self._reads += 1
            return file

    def _end(self) -> None:
        with self._idle:
            self._reads -= 1
            if self._closed:
                self._idle.notify_all()


class _OpenFile:
    def __init__(self, path: Path, expected: FileStamp | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = io.FileIO(path)
            status = os.fstat(self._file.fileno())
        except OSError as error:
            raise ModelFilesError(f"{path}: cannot be opened ({reason(error)})") from None
        stamp = FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)
        if expected is not None and stamp != expected:
            self._file.close()
            raise ModelFilesError(
                f"{path}: changed since the model was opened ({stamp.size} bytes, was {expected.size});"
                " open it again"
            )

    def close(self) -> None:
        self._file.close()

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        done = 0
        while done < out.size:
            try:
                count = self._read_some(offset + done, out[done : done + _READ_MAX].data)
            except OSError as error:
                raise ModelFilesError(
                    f"{self._path}: reading {out.size} bytes at {offset} failed ({reason(error)})"
                ) from None
            if count == 0:
                raise ModelFilesError(
                    f"{self._path}: ends at byte {offset + done}, {out.size - done} bytes of a read"
                    " are missing: cut since the model was opened"
                )
            done += count

    def _read_some(self, offset: int, view: memoryview) -> int:
        """Read at most `len(view)` bytes; 0 at the end of the file."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], offset)
        if hasattr(os, "pread"):
            data = os.pread(self._file.fileno(), len(view), offset)
            view[: len(data)] = data
            return len(data)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(view) or 0
