"""Reading one expert into its slot, and reading it once more when that fails. Runs in the reading threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import ModelFilesError

from .entry import Entry
from .files import ExpertFiles, GiveUp
from .slots import ALIGN


def fill(files: ExpertFiles, entry: Entry, give_up: GiveUp | None, retried: Callable[[], None]) -> None:
    """Read an entry's pieces. A failure is told to `retried`, and the files are opened anew for a second try.

    Raises ModelFilesError when that fails too, ReadGivenUp as `give_up` says.
    """
    try:
        _read_pieces(files, entry, give_up)
    except ModelFilesError:
        retried()
        for piece in entry.placement.pieces:
            files.reopen(piece.path)
        try:
            _read_pieces(files, entry, give_up)
        except ModelFilesError as error:
            layer, expert = entry.key
            raise ModelFilesError(f"{error} (layer {layer}, expert {expert}, tried twice)") from None


def _read_pieces(files: ExpertFiles, entry: Entry, give_up: GiveUp | None) -> None:
    for piece in entry.placement.pieces:
        window: NDArray[np.uint8] = entry.memory.bytes[piece.start - piece.offset % ALIGN :]
        files.read(piece.path, piece.offset, piece.nbytes, window, give_up)
