"""One file of an overlay, written as a stream: rows of a matrix are read, quantised and written in blocks.

Owns the order in a file (codes, scales and biases of a matrix lie together, so one read fetches them) and what is
refused in a weight. The memory it takes is that of a block and of the scales of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from k3mlx.checkpoint.names import TensorSpec
from k3mlx.checkpoint.quantized import rows_of
from k3mlx.checkpoint.safetensors import TensorInfo
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.errors import ModelFilesError

from .affine import LARGEST, quantize
from .files import Entry, Write
from .formats import Format

BLOCK = 1 << 20  # weights quantised at a time
COPIED = 4 << 20  # bytes copied at a time


class Planned(NamedTuple):
    """A tensor and what is to become of it."""

    spec: TensorSpec
    format: Format | None


def dense_entries(checkpoint: Checkpoint, planned: Sequence[Planned]) -> Iterator[Entry]:
    """The tensors of a file, in order."""
    for spec, form in planned:
        info = checkpoint.tensors[spec.name]
        if form is None:
            yield spec.name, info.dtype, info.shape
            continue
        stem, (rows, columns) = spec.name.removesuffix(".weight"), info.shape
        yield f"{stem}.weight", "U32", (rows, columns * form.bits // 32)
        yield f"{stem}.scales", "BF16", (rows, columns // form.group_size)
        yield f"{stem}.biases", "BF16", (rows, columns // form.group_size)


def write_dense(checkpoint: Checkpoint, planned: Sequence[Planned], write: Write) -> dict[str, float]:
    """Give the data of the tensors to `write`, in order; relative errors |W - W'| / |W| of those with codes.

    Raises ModelFilesError for a weight that is not finite or absurdly large.
    """
    errors = {}
    for spec, form in planned:
        info = checkpoint.tensors[spec.name]
        if form is None:
            for block in _blocks(info, COPIED):
                write(checkpoint.read(block))
        else:
            errors[spec.name] = _write_codes(checkpoint, info, form, write)
    return errors


def _write_codes(checkpoint: Checkpoint, info: TensorInfo, form: Format, write: Write) -> float:
    scales, biases = [], []
    error = norm = 0.0
    for block in _blocks(info, BLOCK * info.nbytes // max(1, info.shape[0] * info.shape[1])):
        weights = Checkpoint.widen(checkpoint.read(block), np.float32)
        if not np.abs(weights).max() <= LARGEST:
            raise ModelFilesError(
                f"{info.path}: tensor '{info.name}' has weights that are not finite or absurdly large: damaged"
            )
        found = quantize(weights, *form)
        write(found.codes)
        scales.append(found.scales)
        biases.append(found.biases)
        error += found.squared_error
        norm += float(np.square(weights, dtype=np.float64).sum())
    write(np.concatenate(scales))
    write(np.concatenate(biases))
    return float(f"{(error / norm) ** 0.5:.4g}") if norm else 0.0


def _blocks(info: TensorInfo, nbytes: int) -> Iterator[TensorInfo]:
    """A tensor in runs of rows of about so many bytes, at least one row each."""
    rows = info.shape[0]
    step = max(1, nbytes * rows // max(1, info.nbytes))
    for start in range(0, rows, step):
        yield rows_of(info, start, min(start + step, rows))
