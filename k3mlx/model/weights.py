"""The dense weights of a checkpoint as MLX arrays, read from disk straight into their memory.

Keys are the checkpoint's own names without module prefix and `.weight`, as in the reference. A tensor
stored in the activation dtype is read into its array with no copy between; one that has to be widened or
rounded passes through one temporary of its own size. Routed experts are not loaded here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.names import KEPT_FLOAT32, dense_specs, layer_prefix, layer_specs
from k3mlx.checkpoint.quantized import QuantizedInfo, rows_of
from k3mlx.checkpoint.safetensors import NUMPY_DTYPES, TensorInfo
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.stored import DERIVED
from k3mlx.on_disk import DiskMatrix

from .ops import Matrix, OnDisk, Quantized, Weights

_CODES = {"U32": mx.uint32, "U8": mx.uint8}  # of quantised matrices: parts that keep their dtype
_HOST = {mx.bfloat16: np.uint16, mx.float32: np.float32, mx.uint32: np.uint32, mx.uint8: np.uint8}


class _Rows(NamedTuple):
    """In a stored matrix [H * both, ...]: rows start to stop of each head's `both`, as an array [H, rows, ...]."""

    both: int
    start: int
    stop: int

    def shape(self, stored: TensorInfo) -> tuple[int, ...]:
        return stored.shape[0] // self.both, self.stop - self.start, *stored.shape[1:]


@dataclass(frozen=True)
class LayerWeights:
    """One layer: its norms and residual mixes, its attention, and its dense MLP or mixture of experts."""

    norms: Weights
    attention: Weights
    ffn: Weights


class Loader:
    """Reads tensors of a checkpoint into MLX arrays of `dtype`, or float32 where they are kept so.

    in_place: read into the array's own memory (not on CUDA, where a host view would move it for good). thin:
    embedding and head stay on disk.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, in_place: bool, thin: bool = False) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.dtype = dtype
        self.in_place = in_place
        self.thin = thin
        self._later: list[Callable[[], None]] | None = None  # reads put off, while `begin` makes a layer
        self._sketching = False

    def begin(self, layer: int) -> Callable[[], LayerWeights]:
        """Make the arrays of a layer; the result, which any thread may call, reads their contents into them."""
        if not self.in_place:
            return lambda: self.layer(layer)
        reads = self._later = []
        try:
            weights = self.layer(layer)
        finally:
            self._later = None

        def read() -> LayerWeights:
            for fill in reads:
                fill()
            return weights

        return read

    def sketch(self, layer: int) -> LayerWeights:
        """A layer of arrays of one element, for their names and dtypes."""
        self._sketching = True
        try:
            return self.layer(layer)
        finally:
            self._sketching = False

    def outer(self) -> Weights:
        """Everything outside the layers: embedding, head, final norm, output mix (query as [D])."""
        names = [spec.name for spec in dense_specs(self.config) if not spec.name.startswith("model.layers.")]
        return {_key(name): self._on_disk(name) if self._stays(name) else self.tensor(name) for name in names}

    def _stays(self, name: str) -> bool:
        return (
            self.thin
            and name in ("model.embed_tokens.weight", "lm_head.weight")
            and name not in self.checkpoint.quantized
        )

    def _on_disk(self, name: str) -> OnDisk:
        return OnDisk(DiskMatrix(self.checkpoint, name, np.float32), self.dtype)

    def layer(self, layer: int) -> LayerWeights:
        """One layer without its routed experts.

        The three convolutions become one entry `taps` [3, P, W], `kv_b_proj` its key maps `U` [H, n, r] and
        value maps `O` [H, m, r]; mixing queries stored as [1, D] become [D].
        """
        groups: dict[str, Weights] = {"norms": {}, "self_attn": {}, "mlp": {}, "block_sparse_moe": {}}
        prefix = layer_prefix(layer)
        for spec in layer_specs(self.config, layer):
            module, _, name = spec.name.removeprefix(prefix).partition(".")
            if module not in groups:
                module, name = "norms", module
            if name.endswith("_conv1d.weight") or name == "kv_b_proj.weight":
                continue
            groups[module][_key(name)] = self.tensor(spec.name)
        attention = groups["self_attn"]
        if self.config.layer_kinds[layer] == "kda":
            attention["taps"] = self._taps(prefix)
        else:
            attention |= self._latent_maps(f"{prefix}self_attn.kv_b_proj.weight")
        return LayerWeights(groups["norms"], attention, groups["mlp"] or groups["block_sparse_moe"])

    def tensor(self, name: str) -> Matrix:
        """One tensor as an evaluated array; a mixing query as [D], `A_log` cut to its heads [H].

        A matrix stored as codes stays so.
        """
        quantized = self.checkpoint.quantized.get(name)
        if quantized is not None:
            return self._codes(quantized)
        if name.endswith(".A_log"):
            shape: tuple[int, ...] = self.checkpoint.load(name, np.float32).shape
            return self._array(shape, self._filler(name), self._kept_in(name))
        info = self.checkpoint.tensors[name]
        shape = info.shape[1:] if name.endswith("_res_proj.weight") else info.shape
        return self._array(shape, self._filler(name), self._kept_in(name))

    def _codes(self, info: QuantizedInfo, part: _Rows | None = None) -> Quantized:
        """A quantised matrix; affine scales and biases take the activation dtype, as MLX computes in theirs.

        part: of a matrix of heads, see `_Rows`.
        """

        def array(stored: TensorInfo) -> mx.array:
            dtype = _CODES.get(stored.dtype, self.dtype)
            if part is None:
                return self._array(stored.shape, lambda out: self._read(stored, out), dtype)
            return self._array(part.shape(stored), lambda out: self._read_rows(stored, part, out), dtype)

        biases = None if info.biases is None else array(info.biases)
        return Quantized(array(info.codes), array(info.scales), biases, info.bits, info.group_size, info.mode)

    def _taps(self, prefix: str) -> mx.array:
        names = [f"{prefix}self_attn.{stream}_conv1d.weight" for stream in "qkv"]
        channels, _, width = self.checkpoint.tensors[names[0]].shape

        def fill(out: NDArray) -> None:
            for row, name in zip(out, names, strict=True):
                self._filler(name)(row)

        return self._array((3, channels, width), fill, self._kept_in(names[0]))

    def _latent_maps(self, name: str) -> Weights:
        config, quantized = self.config, self.checkpoint.quantized.get(name)
        nope, both = config.qk_nope_head_dim, config.qk_nope_head_dim + config.v_head_dim
        parts = {"U": _Rows(both, 0, nope), "O": _Rows(both, nope, both)}
        if quantized is not None:
            return {key: self._codes(quantized, part) for key, part in parts.items()}
        info = self.checkpoint.tensors[name]
        if info.dtype == DERIVED:
            stored = self.checkpoint.raw(name)
            return {key: self._slice(stored, part) for key, part in parts.items()}

        def array(part: _Rows) -> mx.array:
            return self._array(part.shape(info), lambda out: self._read_rows(info, part, out), self.dtype)

        return {key: array(part) for key, part in parts.items()}

    def _slice(self, stored: NDArray, part: _Rows) -> mx.array:
        source = stored.reshape(-1, part.both, stored.shape[-1])[:, part.start : part.stop]
        return self._array(source.shape, lambda out: _convert(source, out), self.dtype)

    def _read_rows(self, info: TensorInfo, part: _Rows, out: NDArray) -> None:
        """Each head's rows, read to where they belong."""
        for head, rows in enumerate(out):
            first = head * part.both
            self._read(rows_of(info, first + part.start, first + part.stop), rows)

    def _read(self, info: TensorInfo, out: NDArray) -> None:
        """A stored tensor into an array: as it is if it is of that dtype, else widened or rounded."""
        if NUMPY_DTYPES[info.dtype] == out.dtype:
            self.checkpoint.read(info, out)
        else:
            _convert(self.checkpoint.read(info).reshape(out.shape), out)

    def _kept_in(self, name: str) -> mx.Dtype:
        return mx.float32 if name.endswith(KEPT_FLOAT32) else self.dtype

    def _filler(self, name: str) -> Callable[[NDArray], None]:
        """A function that fills an array (BF16 as uint16) with the tensor's values."""
        checkpoint, info = self.checkpoint, self.checkpoint.tensors[name]

        def fill(out: NDArray) -> None:
            if name.endswith(".A_log"):
                out[...] = checkpoint.load(name, np.float32)
            else:
                self._read(info, out)

        return fill

    def _array(self, shape: tuple[int, ...], fill: Callable[[NDArray], None], dtype: mx.Dtype) -> mx.array:
        """An array filled by `fill`, which sees bfloat16 as uint16."""
        if self._sketching:
            return mx.zeros(1, dtype)
        if not self.in_place:
            host = np.empty(shape, _HOST[dtype])
            fill(host)
            array = _from_host(host)
            mx.eval(array)
            return array
        array = mx.zeros(shape, dtype)
        mx.eval(array)
        bits = array.view(mx.uint16) if dtype == mx.bfloat16 else array
        view = np.array(bits, copy=False)
        if self._later is None:
            fill(view)
        else:
            self._later.append(lambda: fill(view))
        return array


def _convert(stored: NDArray, out: NDArray) -> None:
    """Stored bits (BF16 as uint16, F16 or F32) into float32, or rounded to bf16 where `out` is uint16."""
    if out.dtype == np.float32:
        if stored.dtype == np.uint16:
            np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            out[...] = stored
    elif stored.dtype == np.uint16:
        out[...] = stored
    else:
        bits = stored.astype(np.float32).view(np.uint32)
        # to nearest, ties to even: half of the last kept place, less one unless that place is odd
        out[...] = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16


def _from_host(stored: NDArray) -> mx.array:
    """An array of its own from stored bits (BF16 as uint16)."""
    array = mx.array(stored)
    return array.view(mx.bfloat16) if stored.dtype == np.uint16 else array


def _key(name: str) -> str:
    return name.removesuffix(".weight")
