"""The shape of k3-nano: writes config.json and generation_config.json in the layout of the released wrapper."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from k3mlx import markers
from k3mlx.tokenizer import read_vocabulary

LAYERS = 9
MLA_LAYERS = (4, 8, 9)  # 1-based: the last two are both MLA, as in the released model


def wrapper(ranks: int) -> dict[str, Any]:
    """The whole of config.json for a vocabulary of `ranks` ordinary tokens."""
    ids = {"bos_token_id": ranks, "eos_token_id": ranks + 2, "pad_token_id": ranks + 255}
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": ranks + markers.BLOCK,
        "hidden_size": 192,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 384,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "attn_res_block_size": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "num_heads": 2,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": list(MLA_LAYERS),
            "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in MLA_LAYERS],
        },
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
        "use_cache": True,
        **ids,
        "quantization_config": quantisation(),
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **ids,
        "media_placeholder_token_id": ranks + 21,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def quantisation() -> dict[str, Any]:
    """The block that declares MXFP4 routed experts."""
    weights = {
        "type": "float",
        "num_bits": 4,
        "group_size": 32,
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="model folder, holding tiktoken.model")
    args = parser.parse_args()
    ranks = len(read_vocabulary(args.out / "tiktoken.model"))
    config = wrapper(ranks)
    generation = {
        "temperature": 0,
        "max_length": config["text_config"]["max_position_embeddings"],
        "eos_token_id": ranks + 2,
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (args.out / "generation_config.json").write_text(
        json.dumps(generation, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
