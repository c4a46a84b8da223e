"""The numbers of the released Kimi K3, for planning without any of its files. Source: model specification §1.1."""

from k3mlx.config import ModelConfig

NAME = "moonshotai/Kimi-K3"
_LAYERS = 93


def _kind(layer: int) -> str:
    """Every fourth layer is MLA, and so is the last; 0-based."""
    return "mla" if layer % 4 == 3 or layer == _LAYERS - 1 else "kda"


RELEASED = ModelConfig(
    vocab_size=163_840,
    hidden_size=7168,
    num_hidden_layers=_LAYERS,
    num_attention_heads=96,
    intermediate_size=33_792,
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    rms_norm_eps=1e-5,
    attn_res_block_size=12,
    first_k_dense_replace=1,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    routed_scaling_factor=1.0,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=96,
    kda_head_dim=128,
    short_conv_kernel_size=4,
    gate_lower_bound=-5.0,
    layer_kinds=tuple(map(_kind, range(_LAYERS))),
    max_position_embeddings=1 << 20,
    bos_token_id=163_584,
    eos_token_id=163_586,
    pad_token_id=163_839,
    experts_are_mxfp4=True,
)
