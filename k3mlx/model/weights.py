"""The dense weights of a checkpoint as MLX arrays, read from disk straight into their memory.

Keys are the checkpoint's own names without module prefix and `.weight`, as in the reference. All tensors of a
layer are read at once, in pieces, and widened or rounded as they come. Routed experts are not loaded here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.names import KEPT_FLOAT32, dense_specs, layer_prefix, layer_specs
from k3mlx.checkpoint.quantized import QuantizedInfo
from k3mlx.checkpoint.safetensors import TensorInfo
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.stored import DERIVED
from k3mlx.dense_memory import enough
from k3mlx.dense_reads import DenseReads, Put, Read, Work, convert, into
from k3mlx.on_disk import DiskMatrix
from k3mlx.ranks.part import Cut, Part

from .ops import Matrix, OnDisk, Quantized, Weights
from .pieces import Fill, Piece, cut_values, piece_of
from .region import HOST, Region

_CODES = {"U32": mx.uint32, "U8": mx.uint8}  # of quantised matrices: parts that keep their dtype
_LAYERS_AT_ONCE = 3  # in memory: one in use, one whose last work may not have been evaluated, one being read


@dataclass(frozen=True)
class LayerWeights:
    """One layer: its norms and residual mixes, its attention, and its dense MLP or mixture of experts."""

    norms: Weights
    attention: Weights
    ffn: Weights


class Loader:
    """Reads tensors of a checkpoint into MLX arrays of `dtype`, or float32 where they are kept so.

    in_place: read into the array's own memory (not on CUDA, where a host view would move it for good). thin:
    embedding and head stay on disk. threads, direct: of the reads. part: what a rank has, all if
    None. Called by the thread that owns MLX.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: mx.Dtype,
        in_place: bool,
        thin: bool = False,
        threads: int = 1,
        direct: bool = False,
        part: Part | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.part = part
        self.dtype = dtype
        self.in_place = in_place
        self.thin = thin
        self._reads = DenseReads(checkpoint.stamps, threads, direct)
        self._work = Work()  # of the arrays that have been made and not filled
        self._region: Region | None = None
        self._lending = False  # the arrays being made are to lie in the region
        self._sketched: list[int] | None = None  # bytes of arrays, while they are only sketched

    def stream(self, layers: Collection[int], evaluations: Callable[[], int]) -> None:
        """Have a region for these layers, which are read at each use; `evaluations` counts those waited for."""
        if self.in_place and layers:
            self._region = Region(enough(map(self._sizes, layers), _LAYERS_AT_ONCE), evaluations)

    def begin(self, layer: int, lend: bool = False) -> Callable[[], LayerWeights]:
        """Make the arrays of a layer; the result, which any thread may call, reads their contents into them.

        lend: from the region, until `drop`.
        """
        if not self.in_place:
            return lambda: self.layer(layer)
        self._lending = lend and self._region is not None
        if self._lending and self._region is not None:
            self._region.reserve(layer, self._sizes(layer))
        weights, work = self._layer(layer), self._take_work()

        def read() -> LayerWeights:
            self._reads.run(work)
            return weights

        return read

    def layer(self, layer: int) -> LayerWeights:
        """One layer without its routed experts.

        The three convolutions become one entry `taps` [3, P, W], `kv_b_proj` its key maps `U` [H, n, r] and
        value maps `O` [H, m, r]; mixing queries stored as [1, D] become [D].
        """
        self._lending = False
        weights = self._layer(layer)
        self._reads.run(self._take_work())
        return weights

    def drop(self, layer: int) -> None:
        """Nobody will build on this layer any more: its part of the region is free after one more evaluation."""
        if self._region is not None:
            self._region.drop(layer)

    def close(self) -> None:
        """Let go of threads and files; more reads have them anew."""
        self._reads.close()

    def sketch(self, layer: int) -> LayerWeights:
        """A layer of arrays of one element, for their names and dtypes."""
        self._sketched = []
        try:
            return self._layer(layer)
        finally:
            self._sketched = None

    def _sizes(self, layer: int) -> list[int]:
        """Bytes of a layer's arrays, in the order in which they are made."""
        self._sketched = []
        try:
            self._layer(layer)
            return self._sketched
        finally:
            self._sketched = None

    def outer(self) -> Weights:
        """Everything outside the layers: embedding, head, final norm, output mix (query as [D])."""
        names = [spec.name for spec in dense_specs(self.config) if not spec.name.startswith("model.layers.")]
        self._lending = False
        weights: Weights = {
            _key(name): self._on_disk(name) if self._stays(name) else self._tensor(name)
            for name in filter(self._has, names)
        }
        self._reads.run(self._take_work())
        return weights

    def _stays(self, name: str) -> bool:
        return (
            self.thin
            and name in ("model.embed_tokens.weight", "lm_head.weight")
            and name not in self.checkpoint.quantized
        )

    def _on_disk(self, name: str) -> OnDisk:
        return OnDisk(DiskMatrix(self.checkpoint, name, np.float32), self.dtype)

    def _layer(self, layer: int) -> LayerWeights:
        """The arrays of a layer, some or all still to be filled."""
        groups: dict[str, Weights] = {"norms": {}, "self_attn": {}, "mlp": {}, "block_sparse_moe": {}}
        prefix = layer_prefix(layer)
        for spec in layer_specs(self.config, layer):
            module, _, name = spec.name.removeprefix(prefix).partition(".")
            if module not in groups:
                module, name = "norms", module
            if name.endswith("_conv1d.weight") or name == "kv_b_proj.weight" or not self._has(spec.name):
                continue
            groups[module][_key(name)] = self._tensor(spec.name)
        attention = groups["self_attn"]
        if not attention:
            pass  # no head of this layer is here
        elif self.config.layer_kinds[layer] == "kda":
            attention["taps"] = self._taps(prefix)
        else:
            attention |= self._latent_maps(f"{prefix}self_attn.kv_b_proj.weight")
        return LayerWeights(groups["norms"], attention, groups["mlp"] or groups["block_sparse_moe"])

    def _tensor(self, name: str) -> Matrix:
        """One tensor; a mixing query as [D], `A_log` cut to its heads [H]. A matrix stored as codes stays so."""
        codes = self.checkpoint.quantized.get(name)
        if codes is not None:
            return _quantized(
                codes,
                [
                    self._array(piece.shape, piece.fill, self._coded(piece.info))
                    for piece in (self._piece(name, part) for part in _parts(codes))
                ],
            )
        piece = self._piece(name, self.checkpoint.tensors[name])
        if name.endswith(".A_log"):
            heads = (self.config if self.part is None else self.part.config).kda_num_heads
            return self._array((heads,), self._loaded(name), self._kept_in(name))
        shape = piece.shape[1:] if name.endswith("_res_proj.weight") else piece.shape
        fill = self._loaded(name) if piece.info.dtype == DERIVED else piece.fill
        return self._array(shape, fill, self._kept_in(name))

    def _has(self, name: str) -> bool:
        return self.part is None or self.part.has(name)

    def _cut(self, name: str) -> Cut | None:
        return None if self.part is None else self.part.cut(name)

    def _piece(self, name: str, info: TensorInfo) -> Piece:
        """Of what a tensor is stored as, the part that this process has."""
        return piece_of(info, self._cut(name), self.checkpoint.tensors[name].shape[-1])

    def _taps(self, prefix: str) -> mx.array:
        names = [f"{prefix}self_attn.{stream}_conv1d.weight" for stream in "qkv"]
        infos = [self._piece(name, self.checkpoint.tensors[name]).info for name in names]
        channels, _, width = infos[0].shape

        def fill(work: Work, outs: Sequence[NDArray]) -> None:
            work.reads += [Read(info, into(row)) for info, row in zip(infos, outs[0], strict=True)]

        return self._array((3, channels, width), fill, self._kept_in(names[0]))

    def _latent_maps(self, name: str) -> Weights:
        """U and O: in a matrix [H * (n + m), r], the first n and the last m rows of each head."""
        codes = self.checkpoint.quantized.get(name)
        if codes is None:
            halves = self._halves(self.checkpoint.tensors[name], self.dtype, name)
            return dict(zip("UO", halves, strict=True))
        pairs = [self._halves(part, self._coded(part), name) for part in _parts(codes)]
        return {key: _quantized(codes, [pair[at] for pair in pairs]) for at, key in enumerate("UO")}

    def _halves(self, info: TensorInfo, dtype: mx.Dtype, name: str) -> list[mx.array]:
        nope, value = self.config.qk_nope_head_dim, self.config.v_head_dim
        info = self._piece(name, info).info
        heads, columns = info.shape[0] // (nope + value), info.shape[1:]
        unit = (nope + value) * math.prod(columns)

        def fill(work: Work, outs: Sequence[NDArray]) -> None:
            put = _per_head(outs, unit, nope)
            if info.dtype == DERIVED:
                work.others.append(
                    lambda: put(0, cut_values(self.checkpoint.raw(name), self._cut(name)).reshape(-1))
                )
            else:
                work.reads.append(Read(info, put, unit))

        return self._arrays([(heads, rows, *columns) for rows in (nope, value)], fill, dtype)

    def _coded(self, part: TensorInfo) -> mx.Dtype:
        """Affine scales and biases take the activation dtype, as MLX computes in theirs."""
        return _CODES.get(part.dtype, self.dtype)

    def _kept_in(self, name: str) -> mx.Dtype:
        return mx.float32 if name.endswith(KEPT_FLOAT32) else self.dtype

    def _loaded(self, name: str) -> Fill:
        """Values that are more than stored numbers: `A_log` is checked and cut, some are computed."""

        def fill(work: Work, outs: Sequence[NDArray]) -> None:
            def work_it_out() -> None:
                values = cut_values(self.checkpoint.load(name, np.float32), self._cut(name))
                convert(values.reshape(outs[0].shape), outs[0])

            work.others.append(work_it_out)

        return fill

    def _array(self, shape: tuple[int, ...], fill: Fill, dtype: mx.Dtype) -> mx.array:
        return self._arrays([shape], fill, dtype)[0]

    def _arrays(self, shapes: Sequence[tuple[int, ...]], fill: Fill, dtype: mx.Dtype) -> list[mx.array]:
        """Arrays that `fill` fills, together; in place, with the work that is taken later."""
        if self._sketched is not None:
            self._sketched += [math.prod(shape) * dtype.size for shape in shapes]
            return [mx.zeros(1, dtype) for _ in shapes]
        if not self.in_place:
            hosts, work = [np.empty(shape, HOST[dtype]) for shape in shapes], Work()
            fill(work, hosts)
            self._reads.run(work)
            arrays = [_from_host(host) for host in hosts]
            mx.eval(arrays)
            return arrays
        made = [self._empty(shape, dtype) for shape in shapes]
        fill(self._work, [view for _, view in made])
        return [array for array, _ in made]

    def _empty(self, shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, NDArray]:
        """An array and the host's view of it."""
        lent = self._region.lend(shape, dtype) if self._lending and self._region is not None else None
        if lent is not None:
            return lent
        array = mx.zeros(shape, dtype)
        mx.eval(array)
        return array, np.array(array.view(mx.uint16) if dtype == mx.bfloat16 else array, copy=False)

    def _take_work(self) -> Work:
        work, self._work = self._work, Work()
        return work


def _per_head(outs: Sequence[NDArray], unit: int, nope: int) -> Put:
    """Takes heads of `unit` numbers apart: their first `nope` rows [H, n, ...] and the others [H, m, ...]."""
    columns = outs[0].shape[2:]

    def put(first: int, stored: NDArray) -> None:
        heads = stored.reshape(-1, unit // math.prod(columns), *columns)
        here = slice(first // unit, first // unit + len(heads))
        convert(heads[:, :nope], outs[0][here])
        convert(heads[:, nope:], outs[1][here])

    return put


def _parts(info: QuantizedInfo) -> list[TensorInfo]:
    """Codes, scales and, for affine ones, biases."""
    return [part for part in (info.codes, info.scales, info.biases) if part is not None]


def _quantized(info: QuantizedInfo, parts: Sequence[mx.array]) -> Quantized:
    codes, scales, biases = (*parts, None)[:3]
    assert codes is not None
    assert scales is not None
    return Quantized(codes, scales, biases, info.bits, info.group_size, info.mode)


def _from_host(stored: NDArray) -> mx.array:
    """An array of its own from stored bits (BF16 as uint16)."""
    array = mx.array(stored)
    return array.view(mx.bfloat16) if stored.dtype == np.uint16 else array


def _key(name: str) -> str:
    return name.removesuffix(".weight")
