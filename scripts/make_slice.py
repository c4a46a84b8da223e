"""Write a random checkpoint in the released format: real widths, fewer layers, experts and vocabulary rows.

    python scripts/make_slice.py FOLDER --layers 5 --experts 64 --vocab 4096

For measuring, not for meaning: its answers are noise. Written as a stream, one tensor in memory at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.names import PREFIX, TensorSpec, dense_specs, expert_parts, expert_prefix, layer_specs
from k3mlx.checkpoint.safetensors import ITEMSIZES
from k3mlx.checkpoint.writer import Lazy, to_bf16, write_index, write_safetensors
from k3mlx.config import ModelConfig

RELEASED: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "intermediate_size": 33792,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "attn_res_block_size": 12,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "dtype": "bfloat16",
}
LINEAR: dict[str, Any] = {
    "num_heads": 96,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
    "use_full_rank_gate": True,
}
MXFP4 = {
    "format": "mxfp4-pack-quantized",
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False, "group_size": 32, "num_bits": 4, "scale_dtype": "torch.uint8",
                "strategy": "group", "symmetric": True, "type": "float",
            },
        }
    },
}  # fmt: skip
SCALES = (119, 120, 121)  # E8M0 bytes: codes of about 2.5 become weights of about 1 / sqrt(3584)
BLOCK = (1 << 22) - 3  # random numbers made once and cut at odd places: noise is cheap, making it is not


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument(
        "--width", type=int, default=1, metavar="N", help="divide every width by N (for tests)"
    )
    parser.add_argument(
        "--dense-layers", type=int, default=1, metavar="N", help="first layers without experts (released: 1)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    text = slice_config(args.layers, args.experts, args.vocab, args.width, args.dense_layers)
    size = write_slice(args.folder, text, args.seed)
    print(f"{args.folder}: {size / 1e9:.2f} GB")


def write_slice(folder: Path, text: dict[str, Any], seed: int = 0) -> int:
    """Write config.json, a shard for each layer, one for what lies outside, and the index; returns the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_dict(text)
    (folder / "config.json").write_text(json.dumps(text, indent=1))
    noise = Noise(seed)
    shards = [list(_layer(config, n, noise)) for n in range(config.num_hidden_layers)]
    shards.append(
        [_lazy(s, noise, config) for s in dense_specs(config) if not s.name.startswith("model.layers.")]
    )
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_safetensors(folder / name, shard, {"format": "pt"})
        weight_map.update({tensor: name for tensor, _ in shard})
        total += sum(int(np.prod(t.shape, dtype=object)) * ITEMSIZES[t.dtype] for _, t in shard)
    write_index(folder, weight_map, total)
    return total


def slice_config(layers: int, experts: int, vocab: int, width: int = 1, dense: int = 1) -> dict[str, Any]:
    """The released configuration with other counts; three KDA layers to one MLA layer, the last one MLA."""
    mla = sorted({n for n in range(1, layers + 1) if n % 4 == 0} | {layers})
    narrowed = {
        key: RELEASED[key] // width
        for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "routed_expert_hidden_size",
                    "q_lora_rank", "kv_lora_rank")
    }  # fmt: skip
    heads = max(1, RELEASED["num_attention_heads"] // width)
    text = RELEASED | narrowed | {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "first_k_dense_replace": dense,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts": experts,
        "num_experts_per_token": min(RELEASED["num_experts_per_token"], experts),
        "bos_token_id": vocab - 3,
        "eos_token_id": vocab - 2,
        "pad_token_id": vocab - 1,
        "quantization_config": MXFP4,
        "linear_attn_config": LINEAR | {
            "num_heads": heads,
            "kda_layers": [n for n in range(1, layers + 1) if n not in mla],
            "full_attn_layers": mla,
        },
    }  # fmt: skip
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        **{key: text[key] for key in ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id",
                                      "pad_token_id")},
        "text_config": text,
    }  # fmt: skip


class Noise:
    """Random numbers of any amount from one block of them, cut at a place that each tensor has for itself."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.normal = rng.standard_normal(BLOCK).astype(np.float32)
        self.bytes = rng.integers(0, 256, BLOCK, np.uint8)

    def floats(self, name: str, shape: tuple[int, ...], deviation: float) -> NDArray[np.uint16]:
        """Normal numbers of a standard deviation, as bits of BF16."""
        block = to_bf16(self.normal * np.float32(deviation))
        return np.resize(np.roll(block, _place(name)), shape)

    def codes(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        return np.resize(np.roll(self.bytes, _place(name)), shape)


def _place(name: str) -> int:
    place = 0
    for byte in name.encode():
        place = (place * 131 + byte) % BLOCK
    return place


def _layer(config: ModelConfig, layer: int, noise: Noise) -> Iterator[tuple[str, Lazy]]:
    """A layer's tensors as in the released shards: dense ones first, then experts, not in numeric order."""
    for spec in layer_specs(config, layer):
        yield _lazy(spec, noise, config)
    if not config.is_moe(layer):
        return
    order = np.random.default_rng(layer).permutation(config.num_experts)
    parts = expert_parts(config, mxfp4=True).values()
    for expert in order:
        prefix = expert_prefix(layer, int(expert))
        for part in parts:
            yield _lazy(part._replace(name=prefix + part.name), noise, config)


def _lazy(spec: TensorSpec, noise: Noise, config: ModelConfig) -> tuple[str, Lazy]:
    def make() -> NDArray:
        if spec.name.endswith("weight_packed"):
            return noise.codes(spec.name, spec.shape)
        if spec.name.endswith("weight_scale"):
            return np.array(SCALES, np.uint8)[noise.codes(spec.name, spec.shape) % len(SCALES)]
        if dtype == "F32":
            return _small(spec, config)
        if len(spec.shape) == 1:
            return to_bf16(np.ones(spec.shape, np.float32))
        deviation = 1.0 if spec.name.startswith("model.embed") else spec.shape[-1] ** -0.5
        return noise.floats(spec.name, spec.shape, deviation)

    dtype = spec.dtypes[0]
    return PREFIX + spec.name, Lazy(dtype, spec.shape, make)


def _small(spec: TensorSpec, config: ModelConfig) -> NDArray[np.float32]:
    rng = np.random.default_rng(_place(spec.name))
    if spec.name.endswith("A_log"):
        values = rng.uniform(-1, 1.5, spec.shape)
        values[config.kda_num_heads :] = 0
    elif spec.name.endswith("dt_bias"):
        values = rng.uniform(-4, 1, spec.shape)
    elif spec.name.endswith("e_score_correction_bias"):
        values = rng.uniform(-0.02, 0.02, spec.shape)
    elif spec.name.endswith("_conv1d.weight"):
        values = rng.uniform(-0.5, 0.5, spec.shape)
    else:
        values = np.ones(spec.shape)
    return values.astype(np.float32)


if __name__ == "__main__":
    main()
