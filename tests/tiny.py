"""Small Kimi K3 checkpoints for tests: the specification's deterministic five-layer model, and random ones.

Writes config.json and safetensors in the released layout; no vocabulary. Owns no expected outputs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint import mxfp4
from k3mlx.checkpoint.names import PREFIX, TensorSpec, strip_prefix, tensor_specs
from k3mlx.checkpoint.writer import to_bf16, write_safetensors, write_sharded
from k3mlx.config import ModelConfig

QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def config_dict(**text: Any) -> dict:
    """A `config.json` of the released form around the sizes of the specification's five-layer model.

    Keyword arguments replace fields of `text_config`; those of `linear_attn_config` are merged into it.
    """
    fields: dict = {
        "model_type": "kimi_linear",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "attn_res_block_size": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
        },
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "dtype": "float32",
        "bos_token_id": 61,
        "eos_token_id": 62,
        "pad_token_id": 63,
        "quantization_config": QUANTIZATION,
    }
    linear = text.pop("linear_attn_config", {})
    fields["linear_attn_config"] |= linear
    fields |= text
    fields = {key: value for key, value in fields.items() if value is not None}
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": fields["dtype"],
        "tie_word_embeddings": False,
        "bos_token_id": fields["bos_token_id"],
        "eos_token_id": fields["eos_token_id"],
        "pad_token_id": fields["pad_token_id"],
        "text_config": fields,
    }


SPEC_CONFIG = config_dict()


def spec_hash(number: int, count: int) -> NDArray[np.uint32]:
    """The values t of tensor `number` (from 1), flat indices 0 to count - 1 (model specification §6.3)."""
    t = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1)
    t += np.uint32(number * 0x85EBCA77 & 0xFFFFFFFF)
    t ^= t >> 16
    t *= np.uint32(0x85EBCA6B)
    t ^= t >> 13
    t *= np.uint32(0xC2B2AE35)
    return t ^ t >> 16


def spec_tensors() -> dict[str, NDArray]:
    """Every tensor of the specification's model, sorted by name: uint8 experts, float32 elsewhere."""
    config = ModelConfig.from_dict(SPEC_CONFIG)
    specs = sorted(tensor_specs(config, mxfp4=True), key=lambda spec: spec.name.encode())
    return {spec.name: _spec_values(number, spec) for number, spec in enumerate(specs, 1)}


def _spec_values(number: int, spec: TensorSpec) -> NDArray:
    name, shape = spec.name, spec.shape
    t = spec_hash(number, int(np.prod(shape)))
    if name.endswith("weight_packed"):
        return (t & 255).astype(np.uint8).reshape(shape)
    if name.endswith("weight_scale"):
        return (122 + (t & 3)).astype(np.uint8).reshape(shape)
    u = t / 2.0**32 - 0.5
    if name.endswith("A_log"):
        values = np.where(np.arange(u.size) < 2, 1.5 * u, 0)
    elif name.endswith("dt_bias"):
        values = -1.5 + 3 * u
    elif name.endswith("e_score_correction_bias"):
        values = 0.4 * u
    elif name.endswith("_conv1d.weight"):
        values = 1.6 * u
    elif len(shape) == 1:
        values = 1 + 0.4 * u
    elif name == "model.embed_tokens.weight":
        values = np.sqrt(12) * u
    else:
        values = np.sqrt(12 / shape[-1]) * u * (2 if name.endswith("_res_proj.weight") else 1)
    return values.astype(np.float32).reshape(shape)


def write_spec_model(folder: Path, shards: int = 1) -> Path:
    """Write the specification's five-layer model (§6.3) to `folder` and return it."""
    return write_model(folder, SPEC_CONFIG, spec_tensors(), shards)


def random_config(rng: np.random.Generator, experts: str = "mxfp4", **overrides: Any) -> dict:
    """A `config.json` of odd, unequal sizes; keyword arguments fix fields of `text_config`.

    With `experts="mxfp4"` latent and expert widths are different multiples of 32, with "plain" anything.
    """

    def pick(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    layers = overrides.get("num_hidden_layers") or pick(4, 7)
    linear = overrides.get("linear_attn_config", {})
    kinds = rng.permutation([True, False, *(rng.random(layers - 2) < 0.6)]) if layers > 1 else [True]
    heads, kda_heads = overrides.get("num_attention_heads") or pick(1, 5), pick(1, 4)
    count = overrides.get("num_experts") or pick(5, 11)
    inner, latent = rng.choice([32, 64, 96] if experts == "mxfp4" else range(9, 42), 2, replace=False)
    chosen = {
        "vocab_size": pick(37, 101),
        "hidden_size": pick(17, 71),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": pick(11, 83),
        "attn_res_block_size": pick(1, 4),
        "num_experts": count,
        "num_experts_per_token": pick(1, min(4, count)),
        "num_shared_experts": pick(1, 3),
        "moe_intermediate_size": int(inner),
        "routed_expert_hidden_size": int(latent),
        "routed_scaling_factor": float(rng.uniform(0.5, 2.5)),
        "q_lora_rank": pick(5, 23),
        "kv_lora_rank": pick(5, 23),
        "qk_nope_head_dim": pick(3, 19),
        "qk_rope_head_dim": pick(2, 9),
        "v_head_dim": pick(3, 19),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "quantization_config": QUANTIZATION if experts == "mxfp4" else None,
        "linear_attn_config": {
            "num_heads": kda_heads + (kda_heads == heads),
            "head_dim": 32 * pick(1, 2),
            "short_conv_kernel_size": pick(2, 5),
            "gate_lower_bound": -float(rng.uniform(1, 5)),
            "kda_layers": [i for i, kda in enumerate(kinds, 1) if kda],
            "full_attn_layers": [i for i, kda in enumerate(kinds, 1) if not kda],
            **linear,
        },
    }
    return config_dict(**(chosen | {k: v for k, v in overrides.items() if k != "linear_attn_config"}))


def random_tensors(
    config: dict, rng: np.random.Generator, experts: str | None = None, dtype: str = "F32"
) -> dict[str, Any]:
    """Random weights that keep activations near one: every tensor of `config`, prefix stripped.

    `experts` is "mxfp4" or "plain" (default: as the config declares). With `dtype="BF16"` the tensors that
    are BF16 in the released files are here too; the others stay F32.
    """
    parsed = ModelConfig.from_dict(config)
    packed = parsed.experts_are_mxfp4 if experts is None else experts == "mxfp4"
    tensors: dict[str, Any] = {}
    for spec in tensor_specs(parsed, mxfp4=False):
        values = _random_values(rng, spec, parsed)
        if packed and ".experts." in spec.name:
            tensors[spec.name + "_packed"], tensors[spec.name + "_scale"] = mxfp4.encode(values)
        elif dtype == "BF16" and spec.dtypes[0] == "BF16":
            tensors[spec.name] = ("BF16", to_bf16(values))
        else:
            tensors[spec.name] = values
    return tensors


def _random_values(rng: np.random.Generator, spec: TensorSpec, config: ModelConfig) -> NDArray:
    name, shape = spec.name, spec.shape
    if name.endswith("A_log"):
        values = rng.uniform(-1, 1.5, shape)
        values[config.kda_num_heads :] = 0
    elif name.endswith("dt_bias"):
        values = rng.uniform(-4, 1, shape)
    elif name.endswith("e_score_correction_bias"):
        values = rng.uniform(-0.2, 0.2, shape)
    elif name.endswith("_conv1d.weight"):
        values = rng.uniform(-0.8, 0.8, shape)
    elif len(shape) == 1:
        values = rng.uniform(0.8, 1.2, shape)
    elif name == "model.embed_tokens.weight":
        values = rng.standard_normal(shape)
    else:
        values = rng.standard_normal(shape) / np.sqrt(shape[-1])
    return values.astype(np.float32)


def write_random_model(
    folder: Path,
    config: dict,
    rng: np.random.Generator,
    experts: str | None = None,
    dtype: str = "F32",
    shards: int = 1,
) -> Path:
    """Write a model with random weights (see `random_tensors`) to `folder` and return it."""
    return write_model(folder, config, random_tensors(config, rng, experts, dtype), shards)


def write_model(folder: Path, config: dict, tensors: Mapping[str, Any], shards: int = 1) -> Path:
    """Write config.json and `tensors` under the released prefix: one file, or several and an index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    prefixed = {PREFIX + strip_prefix(name): tensor for name, tensor in tensors.items()}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", prefixed, {"format": "pt"})
    else:
        write_sharded(folder, prefixed, shards=shards, metadata={"format": "pt"})
    return folder
