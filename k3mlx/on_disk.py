"""Dense weights that stay on disk: a matrix is read in pieces, at each use, and nothing of it is kept.

For work that looks at every weight once and must fit beside something else, such as `validate`. Slower than
`dense.LayerRing`, which reads whole layers, and no larger than one piece. Widening is the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .checkpoint.names import dense_specs
from .checkpoint.quantized import rows_of
from .checkpoint.snapshot import Checkpoint
from .dense_native import linear, stored_format, stored_parts
from .kernels.cpu import CpuKernels
from .kernels.cpu_linear import Linear
from .reference.weights import LayerWeights, load_layer

PIECE = 1 << 22  # numbers of a matrix in memory at once


class DiskMatrix:
    """A matrix [rows, columns] of a checkpoint in float32 or float64: `x @ matrix.T` and `matrix[ids]`.

    kernels: what multiplies with rows as they are stored, in float32; numpy with widened ones if None.
    """

    __array_ufunc__ = None  # numpy leaves `x @ matrix.T` to us

    def __init__(
        self, checkpoint: Checkpoint, name: str, dtype: DTypeLike, kernels: CpuKernels | None = None
    ) -> None:
        self.shape: tuple[int, ...] = checkpoint.tensors[name].shape
        self.dtype = np.dtype(dtype)
        self._checkpoint = checkpoint
        self._name = name
        self._kernels = kernels

    @property
    def T(self) -> _Transposed:
        return _Transposed(self)

    def __getitem__(self, ids: NDArray[np.integer]) -> NDArray:
        """Rows ids [T] -> [T, columns]."""
        return np.concatenate([self._rows(id, id + 1) for id in np.asarray(ids).tolist()])

    def pieces(self) -> Iterator[tuple[slice, NDArray]]:
        """All rows, some at a time: (which, their values)."""
        for rows in self._cuts():
            yield rows, self._rows(rows.start, rows.stop)

    def products(self, x: NDArray) -> Iterator[tuple[slice, NDArray]]:
        """`x @ matrix.T` for x [..., columns], some columns of it at a time."""
        for rows in self._cuts():
            yield rows, x @ self._operand(rows.start, rows.stop).T

    def _cuts(self) -> Iterator[slice]:
        step = max(1, PIECE // self.shape[1])
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))

    def _operand(self, start: int, stop: int) -> NDArray | Linear:
        if self._kernels is None:
            return self._rows(start, stop)
        parts = [rows_of(part, start, stop) for part in stored_parts(self._checkpoint, self._name)]
        return linear(
            self._kernels, self._checkpoint, self._name, [self._checkpoint.read(part) for part in parts]
        )

    def _rows(self, start: int, stop: int) -> NDArray:
        checkpoint, codes = self._checkpoint, self._checkpoint.quantized.get(self._name)
        if codes is None:
            stored = checkpoint.read(rows_of(checkpoint.tensors[self._name], start, stop))
            return checkpoint.widen(stored, self.dtype)
        return checkpoint.decoded(codes.rows(start, stop), self.dtype)


class _Transposed:
    __array_ufunc__ = None

    def __init__(self, matrix: DiskMatrix) -> None:
        self.matrix = matrix

    def __rmatmul__(self, x: NDArray) -> NDArray:
        out = np.empty((*x.shape[:-1], self.matrix.shape[0]), x.dtype)
        for rows, product in self.matrix.products(x):
            out[..., rows] = product
        return out


class DiskTensors:
    """The tensors of a checkpoint under its interface, matrices that are only multiplied with left on disk.

    kernels: for those that they can multiply with as they are stored.
    """

    def __init__(self, checkpoint: Checkpoint, kernels: CpuKernels | None = None) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._kernels = kernels
        specs = dense_specs(checkpoint.config) if kernels is not None else ()
        self._stored = {spec.name for spec in specs if stored_format(checkpoint, spec) is not None}

    def load(self, name: str, dtype: DTypeLike = np.float32) -> Any:
        shape = self._checkpoint.tensors[name].shape
        if (
            len(shape) != 2 or shape[0] == 1 or name.endswith("kv_b_proj.weight")
        ):  # that one is cut into heads
            return self._checkpoint.load(name, dtype)
        return DiskMatrix(self._checkpoint, name, dtype, self._kernels if name in self._stored else None)


class DiskLayers(Sequence[LayerWeights]):
    """The layers of the reference with their matrices on disk; vectors are read when a layer's turn comes."""

    def __init__(self, checkpoint: Checkpoint, dtype: DTypeLike) -> None:
        self._tensors = DiskTensors(checkpoint)
        self._dtype = np.dtype(dtype)
        self._last: tuple[int, LayerWeights] | None = None

    def __len__(self) -> int:
        return self._tensors.config.num_hidden_layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            raise TypeError("layers are taken one at a time")
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._last is None or self._last[0] != index:
            self._last = index, load_layer(self._tensors, index, self._dtype)
        return self._last[1]
