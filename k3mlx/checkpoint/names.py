"""The one table of Kimi K3 checkpoint names: what tensors a configuration calls for, with shapes and dtypes.

Names are written without the released prefix `language_model.`; `strip_prefix` takes it off. Owns which
names are skipped (vision, multi-token prediction). Does not look at files.
"""

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from k3mlx.errors import ModelFilesError

from .safetensors import ITEMSIZES

if TYPE_CHECKING:
    from k3mlx.config import ModelConfig

PREFIX = "language_model."
SKIPPED_FAMILIES = ("vision_tower.", "mm_projector.", "mtp.", "model.mtp.", "mtp_", "model.mtp_")
A_LOG_ENTRIES = 128  # the released files pad A_log to this many entries
MXFP4_GROUP = 32
EXPERTS = ".block_sparse_moe.experts."  # between the number of the layer and that of a routed expert

# A float tensor may be stored in any of three formats; the first is the one of the released files.
BF16 = ("BF16", "F16", "F32")
F32 = ("F32", "BF16", "F16")
U8 = ("U8",)
# parameters that stay float32 whatever the activations are (model specification §3.3, D7)
KEPT_FLOAT32 = ("_conv1d.weight", ".A_log", ".dt_bias", ".o_norm.weight", ".e_score_correction_bias")

_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.")


class TensorSpec(NamedTuple):
    """A tensor that a configuration calls for; `short` is its shape if it may be stored unpadded."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    short: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes as stored in the released files."""
        return math.prod(self.shape) * ITEMSIZES[self.dtypes[0]]


def strip_prefix(name: str) -> str:
    """The name without `language_model.`; a bare name stays as it is."""
    return name.removeprefix(PREFIX)


def skip_reason(name: str, num_hidden_layers: int) -> str | None:
    """Why a tensor (prefix stripped) is not part of the text model, or None if it should be."""
    if name.startswith(("vision_tower.", "mm_projector.")):
        return "vision"
    if name.startswith(SKIPPED_FAMILIES) or ".mtp." in name:
        return "multi-token prediction"
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= num_hidden_layers:
        return "layers beyond num_hidden_layers"
    return None


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    return f"model.layers.{layer}{EXPERTS}{expert}."


def expert_parts(config: "ModelConfig", mxfp4: bool) -> dict[str, TensorSpec]:
    """The tensors of one routed expert, keyed and named by what follows `expert_prefix`.

    w1 (gate) and w3 (up) are [F, Λ], w2 (down) is [Λ, F]; in MXFP4 each is packed [out, in/2] and scale
    [out, in/32] (model specification §4.2, §4.3). Raises ModelFilesError for MXFP4 widths that groups of 32
    do not divide.
    """
    inner, latent = config.moe_intermediate_size, config.routed_expert_hidden_size
    if mxfp4:
        for field, width in (("moe_intermediate_size", inner), ("routed_expert_hidden_size", latent)):
            if width % MXFP4_GROUP:
                raise ModelFilesError(
                    f"config.json: {field} is {width}, but MXFP4 experts need a multiple of {MXFP4_GROUP}"
                )
    parts = {}
    for matrix, rows, columns in (("w1", inner, latent), ("w2", latent, inner), ("w3", inner, latent)):
        if mxfp4:
            packed, scale = f"{matrix}.weight_packed", f"{matrix}.weight_scale"
            parts[packed] = TensorSpec(packed, (rows, columns // 2), U8)
            parts[scale] = TensorSpec(scale, (rows, columns // MXFP4_GROUP), U8)
        else:
            parts[f"{matrix}.weight"] = TensorSpec(f"{matrix}.weight", (rows, columns), BF16)
    return parts


def dense_specs(config: "ModelConfig") -> Iterator[TensorSpec]:
    """Every tensor of the text model but the routed experts, in layer order."""
    hidden = config.hidden_size
    yield TensorSpec("model.embed_tokens.weight", (config.vocab_size, hidden), BF16)
    for layer in range(config.num_hidden_layers):
        yield from layer_specs(config, layer)
    yield TensorSpec("model.norm.weight", (hidden,), BF16)
    yield TensorSpec("model.output_attn_res_norm.weight", (hidden,), BF16)
    yield TensorSpec("model.output_attn_res_proj.weight", (1, hidden), BF16)
    yield TensorSpec("lm_head.weight", (config.vocab_size, hidden), BF16)


def layer_specs(config: "ModelConfig", layer: int) -> Iterator[TensorSpec]:
    """The tensors of one layer but its routed experts."""
    prefix, hidden = layer_prefix(layer), config.hidden_size
    for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        yield TensorSpec(f"{prefix}{norm}.weight", (hidden,), BF16)
    for query in ("self_attention_res_proj", "mlp_res_proj"):
        yield TensorSpec(f"{prefix}{query}.weight", (1, hidden), BF16)
    kda = config.layer_kinds[layer] == "kda"
    yield from (_kda if kda else _mla)(config, prefix + "self_attn.")
    if config.is_moe(layer):
        yield from _moe(config, prefix + "block_sparse_moe.")
    else:
        yield from _mlp(prefix + "mlp.", config.intermediate_size, hidden)


def tensor_specs(config: "ModelConfig", mxfp4: bool) -> Iterator[TensorSpec]:
    """Every tensor of the text model, routed experts last, either in MXFP4 or as plain matrices."""
    yield from dense_specs(config)
    parts = expert_parts(config, mxfp4).values()
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            prefix = expert_prefix(layer, expert)
            for part in parts:
                yield part._replace(name=prefix + part.name)


def _kda(config: "ModelConfig", prefix: str) -> Iterator[TensorSpec]:
    hidden, heads, width = config.hidden_size, config.kda_num_heads, config.kda_head_dim
    projection = heads * width
    for stream in "qkv":
        yield TensorSpec(f"{prefix}{stream}_proj.weight", (projection, hidden), BF16)
    for stream in "qkv":
        yield TensorSpec(
            f"{prefix}{stream}_conv1d.weight", (projection, 1, config.short_conv_kernel_size), F32
        )
    yield TensorSpec(f"{prefix}f_a_proj.weight", (width, hidden), BF16)
    yield TensorSpec(f"{prefix}f_b_proj.weight", (projection, width), BF16)
    yield TensorSpec(f"{prefix}b_proj.weight", (heads, hidden), BF16)
    yield TensorSpec(f"{prefix}A_log", (max(A_LOG_ENTRIES, heads),), F32, short=(heads,))
    yield TensorSpec(f"{prefix}dt_bias", (projection,), F32)
    yield TensorSpec(f"{prefix}o_norm.weight", (width,), F32)
    yield TensorSpec(f"{prefix}g_proj.weight", (projection, hidden), BF16)
    yield TensorSpec(f"{prefix}o_proj.weight", (hidden, projection), BF16)


def _mla(config: "ModelConfig", prefix: str) -> Iterator[TensorSpec]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    nope, extra, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    q_rank, rank = config.q_lora_rank, config.kv_lora_rank
    yield TensorSpec(f"{prefix}q_a_proj.weight", (q_rank, hidden), BF16)
    yield TensorSpec(f"{prefix}q_a_layernorm.weight", (q_rank,), BF16)
    yield TensorSpec(f"{prefix}q_b_proj.weight", (heads * (nope + extra), q_rank), BF16)
    yield TensorSpec(f"{prefix}kv_a_proj_with_mqa.weight", (rank + extra, hidden), BF16)
    yield TensorSpec(f"{prefix}kv_a_layernorm.weight", (rank,), BF16)
    yield TensorSpec(f"{prefix}kv_b_proj.weight", (heads * (nope + value), rank), BF16)
    yield TensorSpec(f"{prefix}g_proj.weight", (heads * value, hidden), BF16)
    yield TensorSpec(f"{prefix}o_proj.weight", (hidden, heads * value), BF16)


def _moe(config: "ModelConfig", prefix: str) -> Iterator[TensorSpec]:
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    yield TensorSpec(f"{prefix}gate.weight", (config.num_experts, hidden), BF16)
    yield TensorSpec(f"{prefix}gate.e_score_correction_bias", (config.num_experts,), F32)
    yield TensorSpec(f"{prefix}routed_expert_down_proj.weight", (latent, hidden), BF16)
    yield TensorSpec(f"{prefix}routed_expert_up_proj.weight", (hidden, latent), BF16)
    yield TensorSpec(f"{prefix}routed_expert_norm.weight", (latent,), BF16)
    shared = config.num_shared_experts * config.moe_intermediate_size
    yield from _mlp(prefix + "shared_experts.", shared, hidden)


def _mlp(prefix: str, inner: int, hidden: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}gate_proj.weight", (inner, hidden), BF16)
    yield TensorSpec(f"{prefix}up_proj.weight", (inner, hidden), BF16)
    yield TensorSpec(f"{prefix}down_proj.weight", (hidden, inner), BF16)
