"""Checkpoints of Kimi K3 as mlx-lm converts them, behind the interface of `Checkpoint`.

Owns the other names (`mlp.` for `block_sparse_moe.`, stacked `switch_mlp` experts, fused `qkv_proj` and
`qkv_conv`, `embed_q` and `unembed_out` for `kv_b_proj`) and the quantised matrices. An expert is a slice of
each stacked tensor, found without reading the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from k3mlx.config import CONFIG_BYTES_MAX, ModelConfig
from k3mlx.errors import ModelFilesError

from . import names
from .census import Census
from .findings import Findings
from .layout import Layout, check_link, find_layout
from .manifest import is_overlay
from .overlay import open_overlay
from .quantized import QuantizedInfo, rows_of
from .safetensors import FileStamp, TensorInfo, read_header
from .snapshot import Checkpoint
from .stored import Stored, StoredTensors, derived
from .untrusted import parse_json, read_bounded

STACKED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = {f"{s}_proj.weight": ("qkv_proj", n) for n, s in enumerate("qkv")} | {
    f"{s}_conv1d.weight": ("qkv_conv.conv", n) for n, s in enumerate("qkv")
}


def is_conversion(layout: Layout) -> bool:
    """Whether the tensors of these files have mlx-lm's names."""
    stored = layout.weight_map or read_header(next(iter(layout.shards.values()))).tensors
    return any(".switch_mlp." in name or ".qkv_conv." in name or ".embed_q." in name for name in stored)


def open_checkpoint(folder: Path, elsewhere: Sequence[Path] = ()) -> Checkpoint:
    """The checkpoint in a folder, as released, as converted by mlx-lm, or an overlay. Raises ModelFilesError.

    Shards that are not in the folder may be in those `elsewhere`.
    """
    if is_overlay(folder):
        return open_overlay(folder, elsewhere)
    layout = find_layout(folder, elsewhere)
    kind = MlxLmCheckpoint if is_conversion(layout) else Checkpoint
    return kind.open(folder, elsewhere=elsewhere, layout=layout)


class MlxLmCheckpoint(Checkpoint):
    """A converted checkpoint under the released names.

    `quantized` holds the matrices that have codes. In `tensors` these, and `kv_b_proj`, have the dtype DERIVED.
    """

    def __init__(self, folder: Path, config: ModelConfig, census: Census, stored: _Conversion) -> None:
        super().__init__(folder, config, census)
        self.quantized = MappingProxyType(stored.quantized)
        self.affine_experts = stored.affine_experts
        self._stacks = stored.stacks

    @classmethod
    def open(
        cls,
        folder: str | Path,
        config: ModelConfig | None = None,
        elsewhere: Sequence[Path] = (),
        layout: Layout | None = None,
    ) -> MlxLmCheckpoint:
        """Read every header and check it against the configuration; reads no tensor data.

        Raises ModelFilesError with a line for each finding.
        """
        folder = Path(folder)
        config = config or _read_config(folder)
        findings = Findings()
        infos, stamps = _read_headers(layout or find_layout(folder, elsewhere), findings)
        stored = _Conversion(infos, config, findings)
        findings.raise_if_any()
        config = replace(config, experts_are_mxfp4=stored.mxfp4)
        census = Census(stored.plain | stored.derived, stamps, stored.mxfp4, ("a conversion by mlx-lm",))
        return cls(folder, config, census, stored)

    def load(self, name: str, dtype: DTypeLike = np.float32) -> NDArray:
        if name.endswith("kv_b_proj.weight"):
            return self._kv_b(name.removesuffix("kv_b_proj.weight"), dtype)
        return super().load(name, dtype)

    def expert_tensors(self, layer: int, expert: int) -> dict[str, TensorInfo]:
        """The slices of one expert: "w1.weight_packed" and "w1.weight_scale" for MXFP4, "w1.weight" for plain
        matrices, "w1.codes", "w1.scales", "w1.biases" for affine ones."""
        parts: dict[str, TensorInfo] = {}
        for name in STACKED:
            stack = self._stacks[layer, name]
            if isinstance(stack, TensorInfo):
                parts[f"{name}.weight"] = _squeezed(rows_of(stack, expert, expert + 1))
                continue
            one = stack.rows(expert, expert + 1)
            codes, scales = _squeezed(one.codes), _squeezed(one.scales)
            if stack.mode == "mxfp4":
                rows, words = codes.shape
                parts[f"{name}.weight_packed"] = codes._replace(dtype="U8", shape=(rows, 4 * words))
                parts[f"{name}.weight_scale"] = scales
            else:
                assert one.biases is not None
                parts |= {f"{name}.codes": codes, f"{name}.scales": scales}
                parts[f"{name}.biases"] = _squeezed(one.biases)
        return parts

    def _kv_b(self, prefix: str, dtype: DTypeLike) -> NDArray:
        """[H*(n+m), r] from embed_q [H, r, n] and unembed_out [H, m, r]."""
        keys = self.load(f"{prefix}embed_q.weight", dtype).swapaxes(1, 2)
        values = self.load(f"{prefix}unembed_out.weight", dtype)
        both = np.concatenate([keys, values], axis=1)
        return both.reshape(-1, both.shape[-1])


class _Conversion:
    """Every tensor that the configuration calls for, found under mlx-lm's names."""

    def __init__(self, infos: dict[str, TensorInfo], config: ModelConfig, findings: Findings) -> None:
        self.plain: dict[str, TensorInfo] = {}
        self.derived: dict[str, TensorInfo] = {}
        self.quantized: dict[str, QuantizedInfo] = {}
        self.stacks: dict[tuple[int, str], Stored] = {}
        self._files = StoredTensors(infos, findings)
        for spec in names.dense_specs(config):
            self._dense(spec, config)
            if spec.name not in self.plain:
                self._derive(spec)
        for layer in config.moe_layers:
            self._experts(layer, config)
        layers = config.num_hidden_layers
        self._files.report_surplus(n for n in self._files.left if names.skip_reason(n, layers) is None)

    @property
    def mxfp4(self) -> bool:
        stacks = self.stacks.values()
        return any(isinstance(stack, QuantizedInfo) and stack.mode == "mxfp4" for stack in stacks)

    @property
    def affine_experts(self) -> bool:
        return any(
            isinstance(stack, QuantizedInfo) and stack.mode != "mxfp4" for stack in self.stacks.values()
        )

    def _dense(self, spec: names.TensorSpec, config: ModelConfig) -> None:
        prefix, _, last = spec.name.rpartition("self_attn.")
        if last == "kv_b_proj.weight":
            heads, rank = config.num_attention_heads, config.kv_lora_rank
            self._take(f"{prefix}self_attn.embed_q.weight", (heads, rank, config.qk_nope_head_dim))
            self._take(f"{prefix}self_attn.unembed_out.weight", (heads, config.v_head_dim, rank))
        elif last in _FUSED:
            fused, number = _FUSED[last]
            rows = config.kda_projection
            conv = last.endswith("_conv1d.weight")
            width = config.short_conv_kernel_size
            shape = (3 * rows, width, 1) if conv else (3 * rows, spec.shape[1])
            found = self._files.find(f"{prefix}self_attn.{fused}.weight", shape)
            if isinstance(found, QuantizedInfo):
                self.quantized[spec.name] = found.rows(number * rows, (number + 1) * rows)
            elif found is not None:
                one = rows_of(found, number * rows, (number + 1) * rows)
                self.plain[spec.name] = one._replace(name=spec.name, shape=spec.shape)
        else:
            stored = spec.name.replace(".block_sparse_moe.gate.e_score", ".mlp.e_score")
            self._take(stored.replace(".block_sparse_moe.", ".mlp."), spec.shape, spec.name, spec.short)

    def _derive(self, spec: names.TensorSpec) -> None:
        stem = spec.name.removesuffix("kv_b_proj.weight")
        sources = [spec.name] if stem == spec.name else [f"{stem}embed_q.weight", f"{stem}unembed_out.weight"]
        found = [self.quantized.get(source) or self.plain.get(source) for source in sources]
        if any(found):
            there = [source for source in found if source is not None]
            self.derived[spec.name] = derived(spec.name, spec.shape, there)

    def _experts(self, layer: int, config: ModelConfig) -> None:
        count, inner, latent = (
            config.num_experts,
            config.moe_intermediate_size,
            config.routed_expert_hidden_size,
        )
        for name, theirs in STACKED.items():
            shape = (count, latent, inner) if name == "w2" else (count, inner, latent)
            found = self._files.find(f"{names.layer_prefix(layer)}mlp.switch_mlp.{theirs}.weight", shape)
            if found is not None:
                self.stacks[layer, name] = found

    def _take(
        self,
        stored: str,
        shape: tuple[int, ...],
        name: str | None = None,
        short: tuple[int, ...] | None = None,
    ) -> None:
        found = self._files.find(stored, shape, short)
        if isinstance(found, QuantizedInfo):
            self.quantized[name or stored] = found
        elif found is not None:
            self.plain[name or stored] = found._replace(name=name or stored)


def _squeezed(info: TensorInfo) -> TensorInfo:
    return info._replace(shape=info.shape[1:])


def _read_headers(layout: Layout, findings: Findings) -> tuple[dict[str, TensorInfo], dict[Path, FileStamp]]:
    infos: dict[str, TensorInfo] = {}
    stamps: dict[Path, FileStamp] = {}
    for shard, path in layout.shards.items():
        check_link(path.parent, path)
        if not path.exists():
            findings.add(f"{path}: shard missing ({shard})")
            continue
        header = read_header(path, findings)
        stamps[path] = header.stamp
        for info in header.tensors.values():
            name = names.strip_prefix(info.name)
            if name in infos:
                findings.add(f"{path}: tensor '{name}' is also in {infos[name].path.name}")
            infos[name] = info._replace(name=name)
    return infos, stamps


def _read_config(folder: Path) -> ModelConfig:
    """The configuration without mlx-lm's `quantization`, which the tensors themselves tell."""
    path = folder / "config.json"
    config: Any = parse_json(read_bounded(path, CONFIG_BYTES_MAX), str(path))
    if isinstance(config, dict):
        config = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = config["text_config"] | {"quantization_config": None}
    try:
        return ModelConfig.from_dict(config)
    except ModelFilesError as error:
        raise ModelFilesError(f"{path}: {error}") from None
