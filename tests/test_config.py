"""config.json: the released file, the bare form, and every row of the specification's "reject when" column."""

import copy
import json

import pytest

from k3mlx.config import ModelConfig, load_config
from k3mlx.errors import ModelFilesError

from .paths import DATA, needs_data
from .tiny import config_dict


@needs_data
def test_released_config():
    config = load_config(DATA)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (7168, 93, 163840)
    assert (config.kda_num_heads, config.kda_head_dim, config.kda_projection) == (96, 128, 12288)
    mla = [layer for layer, kind in enumerate(config.layer_kinds) if kind == "mla"]
    assert mla == [*range(3, 92, 4), 92]
    assert not config.is_moe(0)
    assert all(config.is_moe(layer) for layer in range(1, 93))
    assert config.experts_are_mxfp4
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)


def test_bare_text_config_equals_the_wrapped_one():
    wrapped = config_dict()
    assert ModelConfig.from_dict(wrapped["text_config"]) == ModelConfig.from_dict(wrapped)


MISSING = object()
REJECTED = [
    ("model_type", "llama"),
    ("vocab_size", 0),
    ("hidden_size", 2.5),
    ("num_hidden_layers", 4),  # the layer lists cover 5
    ("num_hidden_layers", True),
    ("num_key_value_heads", 1),
    ("hidden_act", "silu"),
    ("activation_situ_beta", 0),
    ("activation_situ_beta", MISSING),
    ("activation_situ_linear_beta", -1),
    ("activation_situ_linear_beta", MISSING),
    ("rms_norm_eps", MISSING),
    ("attn_res_block_size", None),
    ("attn_res_block_size", 0),
    ("moe_layer_freq", 2),
    ("num_experts_per_token", 7),
    ("moe_intermediate_size", 48),
    ("routed_expert_hidden_size", MISSING),
    ("routed_expert_hidden_size", 40),
    ("latent_moe_use_norm", False),
    ("moe_router_activation_func", "softmax"),
    ("moe_renormalize", False),
    ("topk_method", "greedy"),
    ("use_grouped_topk", False),
    ("num_expert_group", 2),
    ("topk_group", 2),
    ("q_lora_rank", None),
    ("mla_use_nope", False),
    ("mla_use_output_gate", False),
    ("tie_word_embeddings", True),
    ("routed_scaling_factor", MISSING),
    ("num_nextn_predict_layers", "none"),
    ("eos_token_id", -1),
    ("linear_attn_config.num_heads", 0),
    ("linear_attn_config.short_conv_kernel_size", 1),
    ("linear_attn_config.gate_lower_bound", MISSING),
    ("linear_attn_config.gate_lower_bound", -5.5),
    ("linear_attn_config.gate_lower_bound", 0),
    ("linear_attn_config.use_full_rank_gate", False),
    ("linear_attn_config.kda_layers", [1, 2, 3, 4]),  # 3 is an MLA layer as well
    ("linear_attn_config.kda_layers", [1, 2]),
    ("linear_attn_config.kda_layers", "all"),
    ("linear_attn_config", MISSING),
    ("quantization_config.quant_method", "awq"),
    ("quantization_config.format", "nvfp4"),
    ("quantization_config.config_groups", {}),
    ("quantization_config.config_groups.group_0.weights.num_bits", 8),
    ("quantization_config.config_groups.group_0.weights.group_size", 16),
    ("quantization_config.config_groups.group_0.weights.symmetric", False),
    ("quantization_config.config_groups.group_0.weights.scale_dtype", "torch.float8"),
]


@pytest.mark.parametrize(
    ("field", "value"), REJECTED, ids=lambda v: "missing" if v is MISSING else str(v)[:24]
)
def test_rejected_field_is_named(field, value):
    config = copy.deepcopy(config_dict())
    *parents, last = field.split(".")
    holder = config["text_config"]
    for parent in parents:
        holder = holder[parent]
    if value is MISSING:
        holder.pop(last)
        config.pop(last, None)  # token ids may also stand in the wrapper
    else:
        holder[last] = value
    with pytest.raises(ModelFilesError) as caught:
        ModelConfig.from_dict(config)
    message = str(caught.value)
    assert last in message or "layer" in message, message
    assert "expected" in message or "cover" in message or "already" in message, message


def test_unknown_wrapper_is_rejected():
    config = config_dict() | {"model_type": "kimi_vl"}
    with pytest.raises(ModelFilesError, match=r'model_type is "kimi_vl", expected "kimi_k3"'):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', "[" * 100_000, "\udcff"])
def test_unreadable_file_is_a_clean_error(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        load_config(tmp_path)


def test_huge_file_is_refused_unread(tmp_path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelFilesError, match="at most"):
        load_config(tmp_path)


def test_missing_file_says_what_a_model_folder_holds(tmp_path):
    with pytest.raises(ModelFilesError, match=r"not found.*tiktoken\.model"):
        load_config(tmp_path)


def test_released_form_round_trips_through_json():
    assert ModelConfig.from_dict(json.loads(json.dumps(config_dict()))) == ModelConfig.from_dict(
        config_dict()
    )
