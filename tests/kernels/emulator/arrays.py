"""Arrays as the emulator takes them: numpy storage with the name of an MLX dtype.

Owns the dtypes, bfloat16 (stored as uint16) among them, and rounding to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# MLX name -> (name in kernel texts, numpy storage)
DTYPES: dict[str, tuple[str, type]] = {
    "bool": ("bool", np.bool_),
    "uint8": ("uint8_t", np.uint8),
    "int8": ("int8_t", np.int8),
    "uint16": ("uint16_t", np.uint16),
    "int16": ("int16_t", np.int16),
    "uint32": ("uint32_t", np.uint32),
    "int32": ("int32_t", np.int32),
    "uint64": ("uint64_t", np.uint64),
    "int64": ("int64_t", np.int64),
    "float16": ("float16_t", np.float16),
    "bfloat16": ("bfloat16_t", np.uint16),
    "float32": ("float", np.float32),
}


@dataclass(frozen=True)
class EmuArray:
    """storage: numpy array of any strides; dtype: the MLX name of what it holds."""

    storage: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.storage.shape

    def values(self) -> np.ndarray:
        """The numbers, bfloat16 widened to float32."""
        if self.dtype != "bfloat16":
            return self.storage
        return (self.storage.astype(np.uint32) << 16).view(np.float32)

    def __getitem__(self, index: Any) -> EmuArray:
        return EmuArray(self.storage[index], self.dtype)


def array(values: Any, dtype: str = "float32") -> EmuArray:
    """Numbers rounded to nearest even in `dtype`."""
    if dtype != "bfloat16":
        return EmuArray(np.asarray(values).astype(DTYPES[dtype][1]), dtype)
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return EmuArray(np.where(np.isnan(np.asarray(values)), 0x7FC0, rounded).astype(np.uint16), "bfloat16")
