"""Whether bytes of a file are in memory or on a disk: what a rate of reads must know to be one of the disk.

Reads nothing: it asks mincore about a mapping that is not touched. (A read that may not wait, RWF_NOWAIT, would
start to fetch what it finds missing.) The same call serves Linux and macOS; it has not been run on a Mac.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import numpy as np


def cached_share(path: str | os.PathLike[str], offset: int, nbytes: int) -> float | None:
    """The share of a file's bytes that is in the page cache, from 0 to 1; None where the system does not say."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _resident(descriptor, offset, nbytes) if _may_ask(path, descriptor) else None
    except (OSError, ValueError):  # a file system without mappings; a file that has become shorter
        return None
    finally:
        os.close(descriptor)


def on_disk(path: str | os.PathLike[str], offset: int, nbytes: int) -> bool:
    """Whether the file system keeps all of these bytes; False where some are a hole, which reads as zeros."""
    if not hasattr(os, "SEEK_HOLE"):
        return True
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.lseek(descriptor, offset, os.SEEK_HOLE) >= offset + nbytes
    except OSError:  # ENXIO: the file has become shorter
        return False
    finally:
        os.close(descriptor)


def _may_ask(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Linux tells owners and writers only, and calls everything resident to others."""
    if not sys.platform.startswith("linux"):
        return True
    return os.geteuid() in (0, os.fstat(descriptor).st_uid) or os.access(path, os.W_OK)


def _resident(descriptor: int, offset: int, nbytes: int) -> float | None:
    first = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset + nbytes - first
    pages = np.empty(-(-length // mmap.PAGESIZE), np.uint8)
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=first) as window:
        address = np.frombuffer(window, np.uint8).ctypes.data
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_void_p(pages.ctypes.data)
        )
    return None if failed else float((pages & 1).mean())
