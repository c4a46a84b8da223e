"""The folders that a conversion writes to: whether they may be used, whether it fits, and who is at work in them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from k3mlx.checkpoint.untrusted import disk_is_full, reason
from k3mlx.errors import K3Error, ResourceError, UsageError
from k3mlx.memory import format_size

_SPARE = 16 << 20  # bytes for the manifest, the vocabulary and what a file system keeps for itself


@contextlib.contextmanager
def claimed(folder: Path, ours: str) -> Iterator[None]:
    """Make a folder and keep other conversions out of it; what a killed run has left half written is removed.

    `ours`: a pattern of file names. Raises UsageError for a folder that has files but none of these, for one that
    cannot be written and for one where a conversion is at work.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_lock(folder))
            present = sorted(folder.iterdir())
            half_written = [path for path in present if path.match(".*.tmp")]
            if len(present) > len(half_written) and not any(path.match(ours) for path in present):
                raise UsageError(
                    f"{folder}: has other files in it; expected a new folder, or the one of a run to go on with"
                )
            for path in half_written:
                path.unlink()
        except OSError as error:
            raise UsageError(f"{folder}: cannot be written to ({reason(error)})") from None
        yield


@contextlib.contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn a failure to write into an error that says what to do: ResourceError for a full disk, else K3Error."""
    try:
        yield
    except OSError as error:
        if disk_is_full(error):
            raise ResourceError(
                f"{path}: disk full; make room and run the same command again: it goes on with what is finished"
            ) from None
        raise K3Error(f"{path}: cannot be written ({reason(error)})") from None


def check_room(files: Iterable[tuple[Path, int]]) -> None:
    """Raise ResourceError if files of these sizes do not fit on the disks that their folders are on."""
    needed: Counter[int] = Counter()
    folders: dict[int, Path] = {}
    for path, size in files:
        device = path.parent.stat().st_dev
        needed[device] += size
        folders[device] = path.parent
    for device, size in needed.items():
        free = shutil.disk_usage(folders[device]).free
        if size + _SPARE > free:
            raise ResourceError(
                f"{folders[device]}: {format_size(size + _SPARE)} are needed, {format_size(free)} are free;"
                " make room, or give a folder on another disk"
            )


def relative(folder: Path, start: Path) -> str:
    """The way from one folder to another; the folder from the root where there is none (another drive)."""
    try:
        return os.path.relpath(folder.resolve(), start.resolve())
    except ValueError:
        return str(folder.resolve())


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by one process at a time, until its end at the latest; nothing where the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{folder}: another conversion is at work in it; wait for it, or stop it"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
