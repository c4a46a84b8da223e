"""A stored matrix in place of an array: `x @ w.T` by the C kernels, whatever it is stored as.

Lets numpy code run on bf16 or on 4 and 8 bits without widening them to memory. Owns no format: that is the matrix's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .cpu import CpuKernels
from .cpu_matrix import Matrix


@dataclass(frozen=True, eq=False)
class Linear:
    """A weight [out, in] of any stored format; only `x @ weight.T` with float32 x is defined."""

    kernels: CpuKernels
    matrix: Matrix
    dtype = np.dtype(np.float32)  # of the products

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.matrix.nbytes

    @cached_property
    def T(self) -> LinearTransposed:
        """What x is multiplied by."""
        return LinearTransposed(self.kernels, self.matrix)


@dataclass(frozen=True, eq=False)
class LinearTransposed:
    """The right side of `x @ w.T`."""

    kernels: CpuKernels
    matrix: Matrix
    __array_ufunc__ = None  # numpy leaves `array @ this` to __rmatmul__

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out)"""
        return self.matrix.shape[1], self.matrix.shape[0]

    def __rmatmul__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """x [..., in] float32 -> [..., out] float32. Raises UsageError for another dtype or width."""
        return self.kernels.matmul(x, self.matrix)
