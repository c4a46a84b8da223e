"""Which part of the dense weights a rank has when they are split: heads of attention, widths of MLPs, rows of the head.

Owns the rule. What all heads share is on every rank that has heads; embedding, norms, routers and latent projections
are rank 0's alone. Reads no file and imports no array library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from k3mlx.checkpoint.names import TensorSpec, layer_prefix
from k3mlx.checkpoint.quantized import QuantizedInfo
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.config import ModelConfig
from k3mlx.errors import UsageError

HEAD = "lm_head.weight"


class Cut(NamedTuple):
    """Indices start to stop of an axis: 0 the rows of a matrix [out, in], 1 its columns."""

    axis: int
    start: int
    stop: int


class Part:
    """What rank `rank` of `size` has. Ranges are contiguous and differ by one unit at most, the first not the smallest.

    quantized: matrices stored as codes, of which only whole groups can be told apart. Raises UsageError when heads are
    no whole number of groups.
    """

    def __init__(
        self, config: ModelConfig, rank: int, size: int, quantized: Mapping[str, QuantizedInfo]
    ) -> None:
        self.rank = rank
        self.size = size
        self._whole = config
        self._quantized = quantized
        self.heads = {
            "kda": divide(config.kda_num_heads, rank, size),
            "mla": divide(config.num_attention_heads, rank, size),
        }
        self.vocab = divide(config.vocab_size, rank, size)
        self.config = replace(
            config, kda_num_heads=len(self.heads["kda"]), num_attention_heads=len(self.heads["mla"])
        )
        for layer, kind in enumerate(config.layer_kinds):
            self._check(f"{layer_prefix(layer)}self_attn.o_proj.weight", self._value_width(kind))

    @classmethod
    def of(cls, checkpoint: Checkpoint, rank: int, size: int) -> Part:
        """What a rank has of a checkpoint."""
        return cls(checkpoint.config, rank, size, checkpoint.quantized)

    def inner(self, layer: int) -> range:
        """Its part of the width of the layer's dense MLP, or of the shared experts."""
        prefix, width = layer_prefix(layer), self._whole.intermediate_size
        module = "mlp"
        if self._whole.is_moe(layer):
            module, width = "block_sparse_moe.shared_experts", self._whole.shared_intermediate_size
        return divide(width, self.rank, self.size, self._group(f"{prefix}{module}.down_proj.weight"))

    def has(self, name: str) -> bool:
        """Whether it has anything of a tensor."""
        cut = self.cut(name)
        if cut is not None:
            return cut.stop > cut.start
        layer = _layer(name)
        if self.rank == 0:
            return True
        return ".self_attn." in name and len(self.heads[self._whole.layer_kinds[layer]]) > 0

    def cut(self, name: str) -> Cut | None:
        """Its part of a tensor, None if that is not divided."""
        if name == HEAD:
            return Cut(0, self.vocab.start, self.vocab.stop)
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if ".self_attn." in name:
            kind = self._whole.layer_kinds[_layer(name)]
            heads, each = self.heads[kind], self._rows(kind).get(leaf)
            if leaf == "o_proj":
                each = self._value_width(kind)
            if each is None:
                return None
            return Cut(int(leaf == "o_proj"), heads.start * each, heads.stop * each)
        if ".mlp." in name or ".shared_experts." in name:
            inner = self.inner(_layer(name))
            return Cut(int(leaf == "down_proj"), inner.start, inner.stop)
        return None

    def bytes_of(self, size_of: Callable[[TensorSpec], int]) -> Callable[[TensorSpec], int]:
        """Sizes of its part of a tensor, of the sizes of the whole."""

        def part_of(spec: TensorSpec) -> int:
            cut, whole = self.cut(spec.name), size_of(spec)
            if not self.has(spec.name):
                return 0
            if cut is None:
                return whole
            return whole * (cut.stop - cut.start) // (spec.short or spec.shape)[cut.axis]

        return part_of

    def bytes_read(self, spec: TensorSpec, stored: int) -> int:
        """Of `stored` bytes of a tensor those that are read for its part: of columns all, as rows lie together."""
        cut = self.cut(spec.name)
        if cut is not None and cut.axis == 1:
            return stored if self.has(spec.name) else 0
        return self.bytes_of(lambda _: stored)(spec)

    def _rows(self, kind: str) -> dict[str, int]:
        """Rows of one head in the tensors whose rows are divided."""
        config = self._whole
        if kind == "kda":
            wide = (
                "q_proj",
                "k_proj",
                "v_proj",
                "f_b_proj",
                "g_proj",
                "dt_bias",
                "q_conv1d",
                "k_conv1d",
                "v_conv1d",
            )
            return {"b_proj": 1, "A_log": 1} | dict.fromkeys(wide, config.kda_head_dim)
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        return {"q_b_proj": config.qk_head_dim, "kv_b_proj": nope + value, "g_proj": value}

    def _value_width(self, kind: str) -> int:
        return self._whole.kda_head_dim if kind == "kda" else self._whole.v_head_dim

    def _group(self, name: str) -> int:
        codes = self._quantized.get(name)
        return 1 if codes is None else codes.group_size

    def _check(self, name: str, width: int) -> None:
        group = self._group(name)
        if self.size > 1 and width % group:
            raise UsageError(
                f"--dense-parallel: {name} is stored in groups of {group} columns and a head has {width}, expected a"
                " multiple; convert with a smaller --group-size, or leave the dense weights on rank 0"
            )


def divide(count: int, rank: int, size: int, unit: int = 1) -> range:
    """The part of `count` things that a rank of `size` gets, in whole units but for the very last."""
    units = -(-count // unit)
    start, stop = (min(count, -(-n * units // size) * unit) for n in (rank, rank + 1))
    return range(start, stop)


def _layer(name: str) -> int:
    """The layer of a tensor's name, -1 for what lies outside."""
    words = name.split(".")
    return int(words[2]) if words[:2] == ["model", "layers"] else -1
