"""Every number of the model, read from `config.json` and checked once.

Accepts the released wrapper (`model_type` kimi_k3 with a `text_config`) and a bare text config
(`model_type` kimi_linear). A field that is missing or that names a variant this package does not
compute is an error, never a default. Knows nothing of tensors or files other than `config.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ModelFilesError

CONFIG_BYTES_MAX = 16 << 20  # the released file has 7,006 bytes
INT_MAX = 1 << 40  # no size of a model comes near; keeps products of sizes out of trouble
MXFP4_GROUP = 32


@dataclass(frozen=True)
class ModelConfig:
    """A Kimi K3 text model. Attribute names are those of the released `text_config`.

    Fields of `linear_attn_config` appear as `kda_num_heads`, `kda_head_dim`,
    `short_conv_kernel_size` and `gate_lower_bound`; its two layer lists as `layer_kinds`.
    Source: model specification §1.1.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    activation_situ_beta: float
    activation_situ_linear_beta: float
    rms_norm_eps: float
    attn_res_block_size: int
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    layer_kinds: tuple[str, ...]  # "kda" or "mla" for each layer, 0-based
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    experts_are_mxfp4: bool
    mla_norm_eps: float = 1e-6  # not in config.json: the first-party class keeps its own default here
    l2_norm_eps: float = 1e-6  # added to the sum of squares of q and k

    @property
    def kda_projection(self) -> int:
        """Width of the KDA q, k, v and gate projections: heads times head width."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one MLP that holds all shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key of one head: both parts together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def moe_layers(self) -> range:
        """The layers (0-based) with the mixture of experts."""
        return range(self.first_k_dense_replace, self.num_hidden_layers)

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (0-based) has the mixture of experts instead of the dense MLP."""
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_dict(cls, config: Any) -> ModelConfig:
        """Read a parsed `config.json`.

        Raises ModelFilesError naming field, got and expected.
        """
        return _read(_Reader(config))


def load_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`. Raises ModelFilesError when it is absent, unreadable or rejected."""
    path = Path(folder) / "config.json"
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ModelFilesError(f"{path}: {path.stat().st_size} bytes, expected at most {CONFIG_BYTES_MAX}")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFilesError(
            f"{path} not found: a model folder holds config.json, tiktoken.model and safetensors"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path}: not readable as JSON ({error})") from None
    try:
        return ModelConfig.from_dict(config)
    except ModelFilesError as error:
        raise ModelFilesError(f"{path}: {error}") from None


class _Reader:
    """Typed access to one JSON object; every complaint names the field by its full path."""

    def __init__(self, values: Any, path: str = "") -> None:
        self.path = path
        if not isinstance(values, dict):
            raise ModelFilesError(f"{path or 'config'} is {_shown(values)}, expected a JSON object")
        self.values = values

    def name(self, field: str) -> str:
        return f"{self.path}.{field}" if self.path else field

    def reject(self, field: str, expected: str) -> ModelFilesError:
        got = _shown(self.values[field]) if field in self.values else "nothing"
        return ModelFilesError(f"{self.name(field)} is {got}, expected {expected}")

    def integer(self, field: str, low: int = 1, high: int = INT_MAX) -> int:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            bound = f" and at most {high}" if high < INT_MAX else ""
            raise self.reject(field, f"an integer of at least {low}{bound}")
        return value

    def positive(self, field: str) -> float:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e30:
            raise self.reject(field, "a number above 0")
        return float(value)

    def require(self, field: str, expected: Any) -> None:
        """The field must be present with exactly this value (`True` is not 1)."""
        value = self.values.get(field)
        if type(value) is not type(expected) or value != expected:
            raise self.reject(field, json.dumps(expected))

    def child(self, field: str) -> _Reader:
        if field not in self.values:
            raise self.reject(field, "a JSON object")
        return _Reader(self.values[field], self.name(field))

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _read(top: _Reader) -> ModelConfig:
    text = top
    if "text_config" in top.values:
        top.require("model_type", "kimi_k3")
        text = top.child("text_config")
    elif top.values.get("model_type") != "kimi_linear":
        raise top.reject(
            "model_type", '"kimi_k3" with a text_config, or a bare text config with "kimi_linear"'
        )
    _require_supported_variant(text)
    layers = text.integer("num_hidden_layers", high=100_000)
    mxfp4 = _quantization(text if text.has("quantization_config") else top)
    linear = text.child("linear_attn_config")
    linear.require("use_full_rank_gate", True)
    experts = text.integer("num_experts", high=1_000_000)
    config = ModelConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=text.integer("num_attention_heads"),
        intermediate_size=text.integer("intermediate_size"),
        activation_situ_beta=text.positive("activation_situ_beta"),
        activation_situ_linear_beta=text.positive("activation_situ_linear_beta"),
        rms_norm_eps=text.positive("rms_norm_eps"),
        attn_res_block_size=text.integer("attn_res_block_size"),
        first_k_dense_replace=text.integer("first_k_dense_replace", low=0),
        num_experts=experts,
        num_experts_per_token=text.integer("num_experts_per_token", high=experts),
        num_shared_experts=text.integer("num_shared_experts"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        routed_expert_hidden_size=text.integer("routed_expert_hidden_size"),
        routed_scaling_factor=text.positive("routed_scaling_factor"),
        q_lora_rank=text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        kda_num_heads=linear.integer("num_heads"),
        kda_head_dim=linear.integer("head_dim"),
        short_conv_kernel_size=linear.integer("short_conv_kernel_size", low=2),
        gate_lower_bound=_gate_lower_bound(linear),
        layer_kinds=_layer_kinds(linear, layers),
        max_position_embeddings=text.integer("max_position_embeddings"),
        bos_token_id=_token_id(top, text, "bos_token_id"),
        eos_token_id=_token_id(top, text, "eos_token_id"),
        pad_token_id=_token_id(top, text, "pad_token_id"),
        experts_are_mxfp4=mxfp4,
    )
    if mxfp4:
        for field in ("moe_intermediate_size", "routed_expert_hidden_size"):
            if getattr(config, field) % MXFP4_GROUP:
                raise text.reject(field, f"a multiple of {MXFP4_GROUP}, the group size of MXFP4 experts")
    return config


def _require_supported_variant(text: _Reader) -> None:
    text.require("model_type", "kimi_linear")
    text.require("hidden_act", "situ")
    heads = text.integer("num_attention_heads")
    if text.values.get("num_key_value_heads") != heads:
        raise text.reject("num_key_value_heads", f"{heads}, as num_attention_heads")
    text.require("moe_layer_freq", 1)
    text.require("latent_moe_use_norm", True)
    text.require("moe_router_activation_func", "sigmoid")
    text.require("moe_renormalize", True)
    text.require("topk_method", "noaux_tc")
    text.require("use_grouped_topk", True)
    text.require("num_expert_group", 1)
    text.require("topk_group", 1)
    text.require("mla_use_nope", True)
    text.require("mla_use_output_gate", True)
    text.require("tie_word_embeddings", False)
    if not isinstance(text.values.get("num_nextn_predict_layers"), int):
        raise text.reject("num_nextn_predict_layers", "an integer")


def _gate_lower_bound(linear: _Reader) -> float:
    value = linear.values.get("gate_lower_bound")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -5 <= value < 0:
        raise linear.reject("gate_lower_bound", "a number in [-5, 0): another gate is another function")
    return float(value)


def _layer_kinds(linear: _Reader, layers: int) -> tuple[str, ...]:
    kinds: dict[int, str] = {}
    for field, kind in (("kda_layers", "kda"), ("full_attn_layers", "mla")):
        numbers = linear.values.get(field)
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise linear.reject(field, "a list of 1-based layer numbers")
        for number in numbers:
            if number in kinds:
                raise ModelFilesError(f"{linear.name(field)} names layer {number}, which is named already")
            kinds[number] = kind
    if sorted(kinds) != list(range(1, layers + 1)):
        odd = sorted(set(kinds) ^ set(range(1, layers + 1)))
        raise ModelFilesError(
            f"{linear.name('kda_layers')} and full_attn_layers must cover 1..{layers} once each;"
            f" missing or beyond: {odd[:8]}"
        )
    return tuple(kinds[number] for number in range(1, layers + 1))


def _token_id(top: _Reader, text: _Reader, field: str) -> int:
    return (text if text.has(field) else top).integer(field, low=0)


def _quantization(holder: _Reader) -> bool:
    """True when the routed experts are declared as MXFP4; other quantisations are refused."""
    if not holder.has("quantization_config"):
        return False
    block = holder.child("quantization_config")
    block.require("quant_method", "compressed-tensors")
    block.require("format", "mxfp4-pack-quantized")
    groups = block.child("config_groups")
    if not groups.values:
        raise block.reject("config_groups", "at least one group")
    for name in groups.values:
        weights = groups.child(name).child("weights")
        weights.require("num_bits", 4)
        weights.require("group_size", MXFP4_GROUP)
        weights.require("symmetric", True)
        weights.require("type", "float")
        weights.require("scale_dtype", "torch.uint8")
    return True
