"""Which dense tensors are quantised, and how: a format for each part of the model.

What is small and sensitive stays as it is: router, norms, convolutions, the decay and beta projections of KDA
(`f_a`, `f_b`, `b`), the queries of the depth mixes, `A_log`, `dt_bias` and the router's bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from k3mlx.errors import UsageError

if TYPE_CHECKING:
    from k3mlx.checkpoint.names import TensorSpec
    from k3mlx.config import ModelConfig

BITS = (4, 8, 16)  # 16: as it is
GROUP_SIZES = (32, 64, 128)  # those that MLX computes
PARTS = {
    "kda": "q, k, v, g and o projections of KDA layers",
    "mla": "projections of MLA layers",
    "mlp": "the dense MLP of the first layers",
    "shared": "shared experts",
    "latent": "projections around the routed experts",
    "embed": "the embedding",
    "head": "the head",
}
_ATTENTION = {
    "kda": ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"),
    "mla": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj"),
}


class Format(NamedTuple):
    """Affine codes of `bits` bits in groups of `group_size` columns."""

    bits: int
    group_size: int


class Formats:
    """The format of each part: `bits` is 4, 8 or 16 (as it is), by part."""

    def __init__(self, bits: Mapping[str, int], group_size: int = 64) -> None:
        """Raises UsageError for parts, bits or groups that there are not."""
        for part, number in bits.items():
            if part not in PARTS or number not in BITS:
                raise UsageError(
                    f"{number} bits for {part}: expected 4, 8 or 16 for one of {', '.join(PARTS)}"
                )
        if group_size not in GROUP_SIZES:
            raise UsageError(f"group size is {group_size}, expected 32, 64 or 128")
        self.bits = {part: bits[part] for part in PARTS}
        self.group_size = group_size

    def of(self, spec: TensorSpec, kind: str) -> Format | None:
        """How a tensor of a layer of this kind is quantised, None if it stays as it is.

        Rows that groups do not divide take smaller ones, of 32 at least, or stay.
        """
        part = part_of(spec.name, kind)
        bits = 16 if part is None else self.bits[part]
        fitting = [g for g in reversed(GROUP_SIZES) if g <= self.group_size and spec.shape[-1] % g == 0]
        return Format(bits, fitting[0]) if bits < 16 and fitting else None


def part_of(name: str, kind: str) -> str | None:
    """The part that a matrix belongs to, in a layer of this kind (`kda` or `mla`); None if it stays as it is."""
    module, _, matrix = name.removesuffix(".weight").rpartition(".")
    if module.endswith(".self_attn"):
        return kind if matrix in _ATTENTION[kind] else None
    if module.endswith(".mlp"):
        return "mlp"
    if module.endswith(".shared_experts"):
        return "shared"
    others = {
        "routed_expert_down_proj": "latent",
        "routed_expert_up_proj": "latent",
        "embed_tokens": "embed",
        "lm_head": "head",
    }
    return others.get(matrix)


def dense_files(config: ModelConfig) -> Iterator[tuple[str, str, list[TensorSpec]]]:
    """The files of an overlay: name, kind of layer, tensors. The first holds what lies outside the layers."""
    from k3mlx.checkpoint.names import dense_specs, layer_specs  # not for the command's help

    outer = [spec for spec in dense_specs(config) if not spec.name.startswith("model.layers.")]
    yield "dense-outer.safetensors", "", outer
    for layer in range(config.num_hidden_layers):
        yield f"dense-{layer:05d}.safetensors", config.layer_kinds[layer], list(layer_specs(config, layer))
