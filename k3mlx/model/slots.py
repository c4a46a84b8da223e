"""Expert slots in memory that MLX owns, so that an expert is computed from the bytes where they were read.

Owns the two views of a slot, numpy's for the reading threads and MLX's for the products. Facts on views
and their lifetime: a slot's array is made once, never assigned to, and kept as long as its view.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import ModelFilesError
from k3mlx.experts.slots import ALIGN, SlotMemory, aligned_view
from k3mlx.experts.store import Held

from .ops import Quantized

SCALE_NAN = 255
ExpertMatrices = tuple[Any, Any, Any]  # w1 gate [F, L], w2 down [L, F], w3 up [F, L]


class MlxSlots:
    """A slot provider (see `k3mlx.experts.slots`) of arrays of bytes. Called by the thread that owns MLX."""

    def __init__(self) -> None:
        self._released = False

    def allocate(self, nbytes: int) -> SlotMemory:
        try:
            owner = mx.array(np.zeros(nbytes + ALIGN, np.uint8))
            view = np.array(owner, copy=False)
        except (RuntimeError, MemoryError) as error:
            raise MemoryError(f"no memory for a slot of {nbytes} bytes ({error})") from None
        aligned, start = aligned_view(view)
        return SlotMemory(aligned, owner, start)

    def release(self, memory: SlotMemory) -> None:
        """The array ends with its last reference, and its memory with `give_back`."""
        self._released = True

    def give_back(self) -> None:
        """Return to the system what MLX keeps of released slots."""
        if self._released:
            self._released = False
            mx.clear_cache()


class ExpertBytes:
    """Turns held experts into MLX matrices without a copy where the slot is MLX's own and suitably aligned."""

    def __init__(self) -> None:
        self._checked: set[tuple[int, int]] = set()

    def matrices(self, layer: int, held: Held) -> ExpertMatrices:
        """w1, w2, w3 of a held expert: valid while it is held, and read when they are evaluated.

        Raises ModelFilesError for a scale byte 255, which is NaN in the format and infinity in MLX.
        """
        if (layer, held.expert) not in self._checked:
            _check_scales(layer, held)
            self._checked.add((layer, held.expert))
        return _matrix(held, "w1"), _matrix(held, "w2"), _matrix(held, "w3")


def _matrix(held: Held, name: str) -> Any:
    if f"{name}.codes" in held.parts:
        return _affine(held, name)
    if f"{name}.weight_packed" in held.parts:
        codes = _array(held, f"{name}.weight_packed", mx.uint32)
        return Quantized(codes, _array(held, f"{name}.weight_scale", mx.uint8), None, 4, 32, "mxfp4")
    return _array(held, f"{name}.weight", _float(held, f"{name}.weight"))


def _affine(held: Held, name: str) -> Quantized:
    codes = _array(held, f"{name}.codes", mx.uint32)
    scales, biases = (_array(held, f"{name}.{p}", _float(held, f"{name}.{p}")) for p in ("scales", "biases"))
    columns = held.parts[f"{'w3' if name == 'w2' else 'w2'}.codes"].shape[
        0
    ]  # each is as wide as the other is high
    return Quantized(
        codes, scales, biases, 32 * codes.shape[1] // columns, columns // scales.shape[1], "affine"
    )


def _float(held: Held, name: str) -> mx.Dtype:
    return {"uint16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}[str(held.parts[name].dtype)]


def _array(held: Held, name: str, dtype: mx.Dtype) -> mx.array:
    """A stored part [rows, columns of `dtype`]."""
    stored: NDArray[Any] = held.parts[name]
    part, memory = held.placement.parts[name], held.memory
    start = memory.start + part.start
    if memory.owner is None or start % dtype.size:
        return mx.array(stored.view(np.uint8)).view(dtype)
    flat = memory.owner[start : start + part.nbytes]
    return flat.view(dtype).reshape(stored.shape[0], -1)


def _check_scales(layer: int, held: Held) -> None:
    for name, stored in held.parts.items():
        if name.endswith(".weight_scale") and stored.max(initial=0) == SCALE_NAN:
            row, group = np.argwhere(stored == SCALE_NAN)[0]
            raise ModelFilesError(
                f"{held.placement.pieces[0].path}: layer {layer}, expert {held.expert}: scale byte 255 (NaN) in"
                f" {name} at row {row}, group {group}; expected 0 to 254: the file is damaged"
            )
