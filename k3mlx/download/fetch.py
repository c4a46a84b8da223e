"""One file: what is missing of it received, all of it hashed, and its name given only when the hash is right.

Runs in any thread. Owns nothing between files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from k3mlx.checkpoint.untrusted import disk_is_full, reason
from k3mlx.errors import K3Error, ModelFilesError
from k3mlx.memory import format_size

from .attempts import Attempts, Meter, Patience, Stopped
from .places import Place, bytes_of, set_aside
from .remote import Hub, RemoteFile, Trouble
from .survey import Entry

_READ = 1 << 20  # bytes at a time from disk


class WrongHash(K3Error):
    """A file came twice with bytes that are not what the repository lists."""


class DamagedOffline(ModelFilesError):
    """A file is damaged and there is no network to fetch it from."""


class Job(NamedTuple):
    """What a thread needs to settle a file. hub is None offline; verified is told of right hashes."""

    hub: Hub | None
    commit: str
    patience: Patience
    meter: Meter
    stop: threading.Event
    verified: Callable[[RemoteFile], None]

    def settle(self, entry: Entry) -> None:
        """Make an entry whole, checked and named. Raises K3Error or Stopped."""
        file, place = entry.file, entry.place
        try:
            if not (entry.whole and self._is_sound(entry)):
                set_aside(place, file)
                self._fetch(file, place)
            place.link(file, entry.twins)
        except OSError as error:
            raise self._unwritable(error, place, file) from None

    def _is_sound(self, entry: Entry) -> bool:
        file, path = entry.file, entry.place.stored(entry.file)
        if not entry.hash_it:
            return True
        if self._hash(path, file, file.size).hexdigest() == file.digest:
            self.verified(file)
            return True
        if self.hub is None:
            raise DamagedOffline(
                f"{path}: not the {file.size} bytes that the repository lists (hash differs)"
            )
        self.meter.note(f"{path}: not what the repository lists (hash differs); fetching it again")
        path.unlink()
        self.meter.add(-file.size)
        return False

    def _fetch(self, file: RemoteFile, place: Place) -> None:
        partial = place.partial(file)
        for again in (False, True):
            if self._receive(file, partial).hexdigest() == file.digest:
                place.publish(file)
                self.verified(file)
                return
            partial.unlink()
            self.meter.add(-file.size)
            if not again:
                self.meter.note(f"{file.name}: came with a wrong hash; fetching it again")
        raise WrongHash(
            f"{file.name}: came twice with a wrong hash, expected {file.digest};"
            " a proxy may alter it, or the disk or memory err"
        )

    def _receive(self, file: RemoteFile, path: Path) -> Any:
        """Append to the partial file until it is complete; return its hash object."""
        if (bytes_of(path) or 0) > file.size:
            path.unlink()
        attempts = Attempts(self.patience, self.stop, self.meter.note)
        with open(path, "ab", buffering=0) as out:
            partial = _Partial(out, self._hash(path, file, out.tell()), self.meter)
            while partial.size < file.size:
                try:
                    self._append(file, partial, attempts)
                except Trouble as trouble:
                    attempts.failed(trouble)
            os.fsync(out.fileno())
        return partial.hasher

    def _append(self, file: RemoteFile, partial: _Partial, attempts: Attempts) -> None:
        """One request, written as it comes; a server that begins anew makes us begin anew."""
        assert self.hub is not None, "offline, nothing is fetched"
        with self.hub.read(self.commit, file, partial.size) as (first, pieces):
            if first != partial.size:
                partial.restart(file.hasher())
            for piece in pieces:
                self._check_stop()  # before writing: the next run may have this file by now
                partial.write(piece)
                attempts.progressed()

    def _hash(self, path: Path, file: RemoteFile, size: int) -> Any:
        """The hash object of a file, fed the first `size` bytes at `path`."""
        hasher = file.hasher()
        with open(path, "rb", buffering=0) as content:
            while piece := content.read(min(_READ, size)):
                hasher.update(piece)
                self.meter.add(hashed=len(piece))
                size -= len(piece)
                self._check_stop()
        return hasher

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def _unwritable(self, error: OSError, place: Place, file: RemoteFile) -> K3Error:
        if disk_is_full(error):
            missing = self.meter.total - self.meter.done
            return K3Error(
                f"{place.root}: disk full at {file.name}; {format_size(missing)} ({missing} bytes) are still"
                " missing. What came is kept: free space, or add folders with --dirs, and run again"
            )
        return K3Error(f"{error.filename or place.stored(file)}: {reason(error)}")


class _Partial:
    """A partial file that is open for appending, the hash of what is in it, and the meter of what it gets."""

    def __init__(self, out: Any, hasher: Any, meter: Meter) -> None:
        self._out = out
        self._meter = meter
        self.hasher = hasher
        self.size = out.tell()  # bytes

    def restart(self, hasher: Any) -> None:
        self._out.truncate(0)
        self._meter.add(-self.size)
        self.hasher = hasher
        self.size = 0

    def write(self, piece: bytes) -> None:
        """All of a piece; the system may take part of it at a time."""
        view = memoryview(piece)
        while view:
            written = self._out.write(view)
            self.hasher.update(view[:written])
            self.size += written
            self._meter.add(written, received=written)
            view = view[written:]
