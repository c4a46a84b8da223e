"""How fast this disk gives experts: plain parallel reads into memory of their own, and the choice of direct.

Independent of the store, so that its rates can be compared with these. Reads nothing twice, since a rate
of cached bytes is no rate of a disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.safetensors import FileStamp
from k3mlx.errors import ModelFilesError

from .files import ExpertFiles, direct_supported
from .layout import ExpertLayout, Placement
from .slots import ALIGN, NumpySlots

PROBE_EXPERTS = 8  # read in each of the two ways
PROBE_MIN_BYTES = 1 << 30  # models with fewer bytes of experts are not worth a probe
FOLIO_MAX = 2 << 20  # the page cache keeps pages in units of up to so many bytes, and drops whole ones only
DIRECT_BONUS = 1.1  # how much faster the page cache must be to be preferred: its copies cost memory


class DirectChoice(NamedTuple):
    """Whether to bypass the page cache, and the two rates in bytes a second that decided it (0: not run)."""

    direct: bool
    direct_rate: float = 0.0
    buffered_rate: float = 0.0


def read_rate(
    files: ExpertFiles,
    placements: Sequence[Placement],
    slot_bytes: int,
    threads: int,
    memories: Sequence[NDArray[np.uint8]] | None = None,
) -> tuple[float, float]:
    """Read experts with parallel threads, each into one slot of its own: (bytes a second, seconds).

    memories: slots to read into, one a thread, from one measurement to the next. Raises ModelFilesError as the
    reads do.
    """
    waiting = list(reversed(placements))
    errors: list[Exception] = []

    if memories is None:
        memories = [NumpySlots().allocate(slot_bytes).bytes for _ in range(threads)]

    def work(memory: NDArray[np.uint8]) -> None:
        memory[::ALIGN] = 1  # have the pages now, as a cache that has been running does
        barrier.wait()
        while waiting and not errors:
            try:
                placement = waiting.pop()
            except IndexError:
                return
            try:
                for piece in placement.pieces:
                    window = memory[piece.start - piece.offset % ALIGN :]
                    files.read(piece.path, piece.offset, piece.nbytes, window)
            except Exception as error:  # told by the thread that waits
                errors.append(error)

    total = sum(piece.nbytes for placement in placements for piece in placement.pieces)
    barrier = threading.Barrier(threads + 1)
    workers = [threading.Thread(target=work, args=(memories[n],), daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    started = perf_counter()
    for worker in workers:
        worker.join()
    seconds = perf_counter() - started
    if errors:
        raise errors[0]
    return total / max(seconds, 1e-9), seconds


def choose_direct(layout: ExpertLayout, stamps: Mapping[Path, FileStamp], threads: int) -> DirectChoice:
    """Try a few experts both ways and take the faster one; the page cache for small models."""
    if not direct_supported() or layout.count * layout.payload < PROBE_MIN_BYTES:
        return DirectChoice(False)
    keys = [(layer, expert) for layer in layout.layers for expert in range(layout.experts)]
    step = max(1, len(keys) // (2 * PROBE_EXPERTS))
    spread = [layout.place(*key) for key in keys[::step][: 2 * PROBE_EXPERTS]]
    files = ExpertFiles(stamps)
    try:
        drop_cached(spread[1::2])
        buffered, _ = read_rate(files, spread[1::2], layout.slot_bytes, threads)
        files.direct = True
        direct, _ = read_rate(files, spread[::2], layout.slot_bytes, threads)
    except ModelFilesError:
        return DirectChoice(False)  # a file system without direct reads; a damaged file shows when it is used
    finally:
        files.close()
    return DirectChoice(direct * DIRECT_BONUS >= buffered, direct, buffered)


def drop_cached(placements: Sequence[Placement]) -> None:
    """Ask the system to forget cached bytes of these experts, where it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return
    for placement in placements:
        for piece in placement.pieces:
            descriptor = os.open(piece.path, os.O_RDONLY)
            try:
                first = max(0, piece.offset - FOLIO_MAX)
                stop = piece.offset + piece.nbytes + FOLIO_MAX
                os.posix_fadvise(descriptor, first, stop - first, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
