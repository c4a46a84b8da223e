"""Routed experts copied into files of their own in the order in which they are read: a layer a file.

Owns that order: experts by number, the tensors of each side by side, the first at a whole disk block, so that a
released expert (17,547,264 bytes, a multiple of 4,096) is one aligned read. The bits are those of the source.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.names import expert_prefix
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.config import ModelConfig

from .files import Entry, Write


def experts_files(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """The files of a repacked model: name and layer."""
    for layer in config.moe_layers:
        yield f"experts-{layer:05d}.safetensors", layer


def experts_entries(checkpoint: Checkpoint, layer: int) -> Iterator[Entry]:
    """The tensors of a file, in order."""
    for expert in range(checkpoint.config.num_experts):
        for part, info in checkpoint.expert_tensors(layer, expert).items():
            yield expert_prefix(layer, expert) + part, info.dtype, info.shape


def write_experts(checkpoint: Checkpoint, layer: int, write: Write) -> None:
    """Give the data of a layer's experts to `write`, in order."""
    for expert in range(checkpoint.config.num_experts):
        stored: dict[str, NDArray] = {}
        for span in checkpoint.expert_spans(layer, expert):
            stored |= checkpoint.read_span(span)
        for part in checkpoint.expert_tensors(layer, expert):
            write(np.ascontiguousarray(stored[part]))
