"""The part of a stored tensor that a process has: some rows, of which nothing else is read, or some columns.

Rows lie together in a file, so of columns all are read and the others dropped as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from numpy.typing import NDArray

from k3mlx.checkpoint.quantized import rows_of
from k3mlx.checkpoint.safetensors import TensorInfo
from k3mlx.dense_reads import Read, Work, convert, into
from k3mlx.ranks.part import Cut

Fill = Callable[[Work, Sequence[NDArray]], None]  # adds what fills these arrays (BF16 as uint16)


class Piece(NamedTuple):
    """`info`: what is read. columns: of each row of it what is kept, all if None."""

    info: TensorInfo
    columns: range | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape if self.columns is None else (self.info.shape[0], len(self.columns))

    def fill(self, work: Work, outs: Sequence[NDArray]) -> None:
        """A `Fill` of one array of this shape."""
        out, columns, width = outs[0], self.columns, self.info.shape[-1]
        if columns is None:
            work.reads.append(Read(self.info, into(out)))
            return

        def put(first: int, stored: NDArray) -> None:
            rows = stored.reshape(-1, width)
            convert(rows[:, columns.start : columns.stop], out[first // width : first // width + len(rows)])

        work.reads.append(Read(self.info, put, width))


def piece_of(info: TensorInfo, cut: Cut | None, width: int) -> Piece:
    """A part of a tensor, or of one of the arrays that a matrix with rows of `width` numbers is stored as."""
    if cut is None:
        return Piece(info)
    if cut.axis == 0:
        return Piece(rows_of(info, cut.start, cut.stop))
    return Piece(info, range(*(n * info.shape[-1] // width for n in (cut.start, cut.stop))))


def cut_values(values: NDArray, cut: Cut | None) -> NDArray:
    """The part of an array that is in memory."""
    if cut is None:
        return values
    kept = slice(cut.start, cut.stop)
    return values[kept] if cut.axis == 0 else values[:, kept]
