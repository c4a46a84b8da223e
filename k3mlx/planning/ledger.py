"""Bytes by group of tensors, on disk and in memory, and what a session keeps. Source: model specification §4.5, §5."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from k3mlx.checkpoint.names import KEPT_FLOAT32, expert_parts
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.config import ModelConfig
from k3mlx.convert.formats import PARTS, dense_files, part_of
from k3mlx.needs import size_in, size_in_codes, state_bytes

EXPERTS = "routed experts"


class Row(NamedTuple):
    """A group of tensors: bytes in each layer that has it (the widest), how many have it, and all together."""

    group: str
    per_layer: int
    layers: int
    total: int


def stored(config: ModelConfig) -> list[Row]:
    """The text model as released, dense groups first, routed experts last."""
    found: dict[str, list[int]] = {}
    outer, *layers = dense_files(config)
    for _, kind, specs in (*layers, outer):
        sizes: Counter[str] = Counter()
        for spec in specs:
            sizes[_group(spec.name, kind)] += spec.nbytes
        for group, size in sizes.items():
            found.setdefault(group, []).append(size)
    rows = [Row(group, max(sizes), len(sizes), sum(sizes)) for group, sizes in found.items()]
    moe = len(config.moe_layers)
    experts = config.num_experts * expert_bytes(config)
    return [*rows, Row(EXPERTS, experts, moe, moe * experts)]


def expert_bytes(config: ModelConfig) -> int:
    """One routed expert as stored."""
    return sum(spec.nbytes for spec in expert_parts(config, config.experts_are_mxfp4).values())


def token_bytes(config: ModelConfig) -> int:
    """Routed experts of one token in all layers."""
    return len(config.moe_layers) * config.num_experts_per_token * expert_bytes(config)


def resident(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes in memory of each part that `k3mlx convert` has a format for, and of the rest, on a GPU with MLX."""
    size_of = size_in_codes(checkpoint, 2, size_in(2, KEPT_FLOAT32))
    sizes: Counter[str] = Counter()
    for _, kind, specs in dense_files(checkpoint.config):
        for spec in specs:
            sizes[part_of(spec.name, kind) or "kept"] += size_of(spec)
    return {part: sizes[part] for part in (*PARTS, "kept") if part in sizes}


def session(config: ModelConfig, context: int) -> dict[str, int]:
    """Bytes of one sequence: KDA states in float32; convolution windows and MLA latents in bf16."""
    states = state_bytes(config, 0, 0, 4)
    windows = state_bytes(config, 0, 2, 0)
    total = state_bytes(config, context, 2, 4)
    return {
        "kda_state": states,
        "kda_windows": windows,
        "mla_latents": total - states - windows,
        "mla_latents_per_token": state_bytes(config, 1, 2, 0) - windows,
        "total": total,
    }


def _group(name: str, kind: str) -> str:
    if ".self_attn." in name:
        return f"{kind.upper()} attention"
    if ".shared_experts." in name:
        return "shared experts"
    if ".routed_expert_" in name:
        return "latent projections and norm"
    if ".block_sparse_moe.gate." in name:
        return "router"
    if ".mlp." in name:
        return "dense MLP"
    if name.startswith("model.layers."):
        return "layer norms and residual mixing"
    outer = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"}
    return outer.get(name, "final norm and output mixing")
