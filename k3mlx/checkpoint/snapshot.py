"""A checkpoint as named arrays: opened after a census, read tensor by tensor or expert by expert.

Owns the widening of stored formats and the merging of an expert's reads. Keeps nothing of what it reads and
computes nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from k3mlx.config import ModelConfig, load_config
from k3mlx.errors import ModelFilesError

from . import mxfp4, names
from .census import Census, take_census
from .files import FilePool
from .layout import Layout
from .quantized import QuantizedInfo, dequantize
from .safetensors import NUMPY_DTYPES, FileStamp, TensorInfo
from .stored import DERIVED

_CHUNK = 1 << 20  # numbers widened at a time

Buffer = NDArray | bytearray | memoryview


class Span(NamedTuple):
    """Adjacent tensors that one read fetches: `nbytes` bytes at `offset` of `path`, parts in file order.

    A part, keyed as in `Checkpoint.expert_tensors`, starts `part.offset - span.offset` bytes into the span.
    """

    path: Path
    offset: int
    nbytes: int
    parts: dict[str, TensorInfo]


class Checkpoint:
    """The tensors of a complete Kimi K3 text model on disk. Any number of threads may read at once.

    Names come without the prefix `language_model.`. `mxfp4` says how the routed experts are stored, `notes`
    what was left aside (vision tensors, for instance), `stamps` what each file looked like. `quantized` are
    matrices stored as MLX's codes (in `tensors` they have the dtype DERIVED, no bits of their own, and the bytes of
    all parts) and `affine_experts` says so of the experts: neither occurs in a release.
    """

    quantized: Mapping[str, QuantizedInfo] = MappingProxyType({})
    affine_experts = False

    def __init__(self, folder: Path, config: ModelConfig, census: Census) -> None:
        self.folder = folder
        self.config = config
        self.mxfp4 = census.mxfp4
        self.notes = census.notes
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(census.tensors)
        self._parts = tuple(names.expert_parts(config, census.mxfp4))
        self.stamps: Mapping[Path, FileStamp] = MappingProxyType(census.stamps)
        self._files = FilePool(census.stamps)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        config: ModelConfig | None = None,
        elsewhere: Sequence[Path] = (),
        layout: Layout | None = None,
    ) -> "Checkpoint":
        """Take a census of `folder` and open it; `config` is read from it unless given.

        Shards that are not in it may be in the folders `elsewhere`. layout: what `find_layout` has said of them.

        Raises ModelFilesError with a line for each finding (see `census.take_census`). Reads no tensor data.
        """
        folder = Path(folder)
        if config is None:
            config = load_config(folder)
        return cls(folder, config, take_census(folder, config, elsewhere, layout))

    def close(self) -> None:
        """Close the files, after waiting for reads in progress. Later reads raise K3Error."""
        self._files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def raw(self, name: str, out: Buffer | None = None) -> NDArray:
        """The stored bits of a tensor, in its shape: BF16 as uint16, F16, F32 and U8 as themselves.

        With `out`, a writable contiguous buffer of exactly the tensor's bytes, the file is read straight into
        it and the result is a view of it. A matrix that is not stored as such comes as float32. Raises KeyError
        for an unknown name, ModelFilesError when the file has changed or cannot be read.
        """
        info = self.tensors[name]
        if info.dtype != DERIVED:
            return self.read(info, out)
        if out is not None:
            raise ValueError(f"{name} is not stored as a matrix: it cannot be read into a buffer")
        return self.load(name, np.float32)

    def read(self, info: TensorInfo, out: Buffer | None = None) -> NDArray:
        """`raw` for a tensor of these files, or some rows of it, that the caller has the place of."""
        target = np.empty(info.nbytes, np.uint8) if out is None else _bytes_of(out, info.nbytes)
        self._files.read_into(info.path, info.offset, target)
        return _as_stored(target, info)

    def load(self, name: str, dtype: DTypeLike = np.float32) -> NDArray:
        """A float tensor widened to float32 or float64, in its shape; `A_log` is cut to its heads [H].

        Raises ModelFilesError also when the padding of `A_log` is not zero.
        """
        quantized = self.quantized.get(name)
        if quantized is not None:
            return self.decoded(quantized, dtype)
        info = self.tensors[name]
        if info.dtype == "BF16" and np.dtype(dtype) == np.float32:
            values = self._load_bf16(info)
        else:
            values = self.widen(self.raw(name), dtype)
        if not name.endswith(".A_log"):
            return values
        heads = self.config.kda_num_heads
        if values[heads:].any():
            raise ModelFilesError(
                f"{info.path}: tensor '{name}' has numbers other than zero beyond its {heads} heads: damaged,"
                " or num_heads in config.json is wrong"
            )
        return values[:heads]

    def raw_parts(self, info: QuantizedInfo) -> tuple[NDArray, NDArray, NDArray | None]:
        """Codes, scales and biases of a quantised matrix, as stored (BF16 as uint16)."""
        codes, scales = self.read(info.codes), self.read(info.scales)
        return codes, scales, None if info.biases is None else self.read(info.biases)

    def expert_tensors(self, layer: int, expert: int) -> dict[str, TensorInfo]:
        """The tensors of one routed expert by what follows its number: "w1.weight_packed" and so on."""
        prefix = names.expert_prefix(layer, expert)
        return {part: self.tensors[prefix + part] for part in self._parts}

    def expert_spans(self, layer: int, expert: int) -> tuple[Span, ...]:
        """The fewest reads that fetch an expert: a single one where its tensors are adjacent in the file."""
        return _merge(self.expert_tensors(layer, expert))

    def read_span(self, span: Span, out: Buffer | None = None) -> dict[str, NDArray]:
        """Fetch a span with one read, into `out` if given, and return views of its parts as `raw` would."""
        target = np.empty(span.nbytes, np.uint8) if out is None else _bytes_of(out, span.nbytes)
        self._files.read_into(span.path, span.offset, target)
        starts = {part: info.offset - span.offset for part, info in span.parts.items()}
        return {
            part: _as_stored(target[starts[part] : starts[part] + info.nbytes], info)
            for part, info in span.parts.items()
        }

    def load_expert(
        self, layer: int, expert: int, dtype: DTypeLike = np.float32
    ) -> tuple[NDArray, NDArray, NDArray]:
        """w1 (gate) [F, Λ], w2 (down) [Λ, F] and w3 (up) [F, Λ] of one routed expert, decoded."""
        stored: dict[str, NDArray] = {}
        for span in self.expert_spans(layer, expert):
            stored |= self.read_span(span)
        if not self.mxfp4:
            w1, w2, w3 = (self.widen(stored[f"{w}.weight"], dtype) for w in ("w1", "w2", "w3"))
            return w1, w2, w3
        try:
            w1, w2, w3 = (
                mxfp4.decode(stored[f"{w}.weight_packed"], stored[f"{w}.weight_scale"], dtype)
                for w in ("w1", "w2", "w3")
            )
        except ModelFilesError as error:
            path = self.expert_tensors(layer, expert)["w1.weight_scale"].path
            raise ModelFilesError(f"{path}: layer {layer}, expert {expert}: {error}") from None
        return w1, w2, w3

    def decoded(self, info: QuantizedInfo, dtype: DTypeLike) -> NDArray:
        """The values of a quantised matrix of these files, or of some rows of it."""
        codes, scales, biases = self.raw_parts(info)
        if scales.dtype != np.uint8:
            scales = self.widen(scales, dtype)
        return dequantize(codes, scales, None if biases is None else self.widen(biases, dtype), info, dtype)

    @staticmethod
    def widen(stored: NDArray, dtype: DTypeLike = np.float32) -> NDArray:
        """Stored bits (BF16 as uint16, F16 or F32) as float32 or float64, in the same shape."""
        if stored.dtype == np.uint16:
            stored = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
        if stored.dtype.kind != "f":
            raise ValueError(f"a tensor stored as {stored.dtype} has no float values of its own")
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one; the logits will tell
            return stored.astype(dtype, copy=False)

    def _load_bf16(self, info: TensorInfo) -> NDArray[np.float32]:
        """Widen in place: the bits are read into the upper half of the result and spread from its start."""
        out = np.empty(info.shape, np.float32)
        bits = out.reshape(-1).view(np.uint32)
        half = out.reshape(-1).view(np.uint8)[info.nbytes :]
        self._files.read_into(info.path, info.offset, half)
        stored = half.view("<u2")
        for start in range(0, bits.size, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            np.left_shift(stored[chunk], 16, out=bits[chunk], dtype=np.uint32)
        return out


def read_tensor(info: TensorInfo) -> NDArray:
    """The stored bits of a tensor of any safetensors file, as `Checkpoint.raw` returns them."""
    files = FilePool({})
    try:
        target = np.empty(info.nbytes, np.uint8)
        files.read_into(info.path, info.offset, target)
        return _as_stored(target, info)
    finally:
        files.close()


def _as_stored(flat: NDArray[np.uint8], info: TensorInfo) -> NDArray:
    return flat.view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)


def _bytes_of(out: Buffer, nbytes: int) -> NDArray[np.uint8]:
    """A flat byte view of a caller's buffer, which must be writable, contiguous and of that size."""
    array = out if isinstance(out, np.ndarray) else np.asarray(memoryview(out))
    if array.nbytes != nbytes or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"out has {array.nbytes} bytes; expected a writable contiguous buffer of {nbytes}")
    return array.reshape(-1).view(np.uint8)


def _merge(tensors: dict[str, TensorInfo]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for part, info in sorted(tensors.items(), key=lambda item: (str(item[1].path), item[1].offset)):
        last = spans[-1] if spans else None
        if last and last.path == info.path and last.offset + last.nbytes == info.offset:
            spans[-1] = last._replace(nbytes=last.nbytes + info.nbytes, parts=last.parts | {part: info})
        else:
            spans.append(Span(info.path, info.offset, info.nbytes, {part: info}))
    return tuple(spans)
