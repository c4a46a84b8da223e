"""Where an expert's bytes are on disk and where they go in a slot.

Tensors that are adjacent or nearly so are merged into one piece, so a released expert is one read. A
piece keeps its position modulo ALIGN, so the same slot serves direct and buffered reads without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.safetensors import NUMPY_DTYPES, TensorInfo
from k3mlx.checkpoint.snapshot import Checkpoint

from .slots import ALIGN, round_up

GAP_MAX = 2 * ALIGN  # bytes read in vain to save a read; no more than the windows of a separate one


class Piece(NamedTuple):
    """One read: `nbytes` bytes at `offset` of `path`, to `start` of the slot."""

    path: Path
    offset: int
    nbytes: int
    start: int


class Part(NamedTuple):
    """One tensor in a slot: where it starts, its bytes, and how they are to be seen."""

    start: int
    nbytes: int
    dtype: np.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """One expert: the reads that fetch it and the tensors they leave in a slot."""

    pieces: tuple[Piece, ...]
    parts: dict[str, Part]

    @property
    def position(self) -> tuple[str, int]:
        """For ordering reads by their place on disk."""
        return str(self.pieces[0].path), self.pieces[0].offset

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray]:
        """The tensors in a filled slot, as stored: "w1.weight_packed" and so on (BF16 as uint16)."""
        return {
            name: memory[part.start : part.start + part.nbytes].view(part.dtype).reshape(part.shape)
            for name, part in self.parts.items()
        }


class ExpertLayout:
    """Placements of all experts of a checkpoint, made when first asked for.

    `payload` is what one expert's tensors take, `slot_bytes` what a slot needs with room for alignment.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._placements: dict[tuple[int, int], Placement] = {}
        config = checkpoint.config
        self.layers = tuple(filter(config.is_moe, range(config.num_hidden_layers)))
        self.experts = config.num_experts
        self.payload = self.slot_bytes = 0
        if self.layers:
            self.slot_bytes = max(self._slot_bytes(layer) for layer in self.layers)

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.layers) * self.experts

    def place(self, layer: int, expert: int) -> Placement:
        """Where one expert is and goes."""
        key = layer, expert
        placement = self._placements.get(key)
        if placement is None:
            placement = self._placements[key] = _place(self._checkpoint.expert_tensors(layer, expert))
        return placement

    def _slot_bytes(self, layer: int) -> int:
        """Enough for any expert of a layer, whose tensors may lie apart: a window for each."""
        widest = 0
        for expert in range(1 if self._checkpoint.mxfp4 else self.experts):  # plain ones may differ in dtype
            tensors = self._checkpoint.expert_tensors(layer, expert).values()
            payload = sum(info.nbytes for info in tensors)
            self.payload = max(self.payload, payload)
            widest = max(widest, round_up(payload) + len(tensors) * GAP_MAX)
        return widest


def _place(tensors: dict[str, TensorInfo]) -> Placement:
    pieces: list[Piece] = []
    parts: dict[str, Part] = {}
    used = 0  # bytes of the slot up to the end of the last window
    for name, info in sorted(tensors.items(), key=lambda item: (str(item[1].path), item[1].offset)):
        last = pieces[-1] if pieces else None
        gap = info.offset - (last.offset + last.nbytes) if last and last.path == info.path else -1
        if last and 0 <= gap <= GAP_MAX:
            pieces[-1] = last._replace(nbytes=last.nbytes + gap + info.nbytes)
        else:
            pieces.append(Piece(info.path, info.offset, info.nbytes, used + info.offset % ALIGN))
        piece = pieces[-1]
        start = piece.start + info.offset - piece.offset
        parts[name] = Part(start, info.nbytes, NUMPY_DTYPES[info.dtype], info.shape)
        used = round_up(piece.start + piece.nbytes)
    return Placement(tuple(pieces), parts)
