"""Writing safetensors files, single or in shards with an index, as a stream: one tensor in memory at a time.

A file appears under its name only when it is complete. Owns bf16 rounding on the way out; decides nothing
about names or contents.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .safetensors import HEADER_MAX, ITEMSIZES, NUMPY_DTYPES

INDEX_NAME = "model.safetensors.index.json"


class Lazy(NamedTuple):
    """A tensor made when its turn to be written comes: `make` returns the array of `(dtype, array)`."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], NDArray]


Tensor: TypeAlias = "NDArray | tuple[str, NDArray] | Lazy"
Tensors: TypeAlias = "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"


def to_bf16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even, overflow to infinity, NaN kept as a quiet NaN."""
    values = np.asarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.ascontiguousarray(values, np.float32)
    bits = single.view(np.uint32).reshape(values.shape)
    nan = np.isnan(single)
    if values.dtype == np.float64:  # a sticky last bit, so that rounding twice is rounding once
        larger = np.abs(single) > np.abs(values)
        bits = np.where(single == values, bits, bits - larger | 1)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(nan, (bits >> 16 | 0x40).astype(np.uint16), rounded)


def encode_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The head of a file of tensors (name, dtype, shape) laid end to end: length, JSON padded to 8 bytes."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in entries:
        if name in header:
            raise ValueError(f"tensor {name!r} is given twice")
        dims = [int(n) for n in shape]
        start, end = end, end + math.prod(dims) * ITEMSIZES[dtype]
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_MAX:
        raise ValueError(f"the header would have {len(text)} bytes, more than {HEADER_MAX}; use more shards")
    return len(text).to_bytes(8, "little") + text


def write_safetensors(path: str | Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> int:
    """Write one file, in the order given, and return its size in bytes.

    A tensor is a numpy array, `(dtype, array)` (needed for BF16, whose bits are a uint16 array), or `Lazy`.
    The file is written under a temporary name and renamed when complete.
    """
    return _write(Path(path), _normalised(tensors), metadata)


def write_sharded(
    folder: str | Path,
    tensors: Tensors,
    *,
    shards: int | None = None,
    max_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write `model-00001-of-00000N.safetensors` … and the index, in the order given; return the index's path.

    Either `shards` files of about equal size, or as many as keep each file's tensors within `max_bytes`
    (a larger tensor gets a file of its own). The index is written last.
    """
    folder = Path(folder)
    groups = _split(_normalised(tensors), shards, max_bytes)
    weight_map = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):06d}.safetensors"
        _write(folder / name, group, metadata)
        weight_map.update(dict.fromkeys((tensor for tensor, _ in group), name))
    total = sum(_nbytes(tensor) for group in groups for _, tensor in group)
    return write_index(folder, weight_map, total)


def write_index(folder: str | Path, weight_map: Mapping[str, str], total_size: int) -> Path:
    """Write `model.safetensors.index.json`: which file holds each tensor, and the bytes of all tensors."""
    path = Path(folder) / INDEX_NAME
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    with replacing(path) as file:
        file.write(json.dumps(index, indent=1).encode())
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` when the block ends well and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write(path: Path, tensors: list[tuple[str, Lazy]], metadata: Mapping[str, str] | None) -> int:
    head = encode_header(((name, lazy.dtype, lazy.shape) for name, lazy in tensors), metadata)
    with replacing(path) as file:
        file.write(head)
        for name, lazy in tensors:
            array = lazy.make()
            expected = NUMPY_DTYPES[lazy.dtype]
            if array.shape != lazy.shape or array.dtype != expected:
                raise ValueError(f"{name}: {array.dtype}{array.shape}, expected {expected}{lazy.shape}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return file.tell()


def _normalised(tensors: Tensors) -> list[tuple[str, Lazy]]:
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    normalised = [(name, _lazy(name, tensor)) for name, tensor in items]
    if len({name for name, _ in normalised}) < len(normalised):
        raise ValueError("a tensor name is given twice")
    return normalised


def _lazy(name: str, tensor: Tensor) -> Lazy:
    if isinstance(tensor, Lazy):
        dtype, make = tensor.dtype, tensor.make
        shape = tuple(tensor.shape)
    else:
        dtype, array = tensor if isinstance(tensor, tuple) else (_dtype_of(name, tensor), tensor)
        shape, make = array.shape, lambda: array
    if dtype not in NUMPY_DTYPES:
        raise ValueError(f"{name}: dtype {dtype!r} is not one of {', '.join(NUMPY_DTYPES)}")
    return Lazy(dtype, shape, make)


def _dtype_of(name: str, array: NDArray) -> str:
    for dtype, numpy_dtype in NUMPY_DTYPES.items():
        if array.dtype == numpy_dtype and dtype != "BF16":
            return dtype
    raise ValueError(f"{name}: no dtype for a {array.dtype} array; give (dtype, array), as for BF16")


def _nbytes(lazy: Lazy) -> int:
    return int(np.prod(lazy.shape, dtype=object)) * ITEMSIZES[lazy.dtype]


def _split(
    tensors: list[tuple[str, Lazy]], shards: int | None, max_bytes: int | None
) -> list[list[tuple[str, Lazy]]]:
    if (shards is None) == (max_bytes is None):
        raise ValueError("give either shards or max_bytes")
    if shards is not None and not 1 <= shards <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot fill {shards} shards")
    total = sum(_nbytes(tensor) for _, tensor in tensors)
    groups: list[list[tuple[str, Lazy]]] = [[]]
    written = in_group = 0
    for position, (name, tensor) in enumerate(tensors):
        size = _nbytes(tensor)
        if shards is None:
            full = in_group + size > (max_bytes or 0)
        else:
            wanted = shards - len(groups)  # groups still to be opened
            full = wanted > 0 and (
                written * shards >= total * len(groups) or len(tensors) - position <= wanted
            )
        if full and groups[-1]:
            groups.append([])
            in_group = 0
        groups[-1].append((name, tensor))
        written += size
        in_group += size
    return groups
