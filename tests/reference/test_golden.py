"""Against captures of the first-party code: 93 layers, the real layer pattern, reduced widths.

The captures are of one decode step (id 9) after a prompt of ids 1 to 8.
"""

import numpy as np
import pytest

import k3mlx
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.reference.model import Hooks
from tests.paths import GOLDEN_RUN, needs_golden, write_golden

pytestmark = needs_golden

LAYERS = (0, 1, 3, 12, 91, 92)

# capture name within a layer -> our stage within a layer: the same numbers, perhaps in another shape
COMMON = {
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "self_attn.o_proj": "attention",
    "self_attention_res.out": "attention_mix",
    "mlp_res.out": "mlp_mix",
    "post_attention_layernorm": "mlp_norm",
    "0": "partial",
}
KDA = {
    **{f"self_attn.{s}_proj": f"kda.{s}" for s in "qkv"},
    **{f"self_attn.{s}_conv1d.0": f"kda.{s}_conv" for s in "qkv"},
    "self_attn.f_b_proj": "kda.z",
    "self_attn.b_proj": "kda.b",
    "self_attn.g_proj": "kda.gate",
    **{f"kda.fused_recurrent_kda.in.{s}": f"kda.{s}_conv" for s in "qkv"},
    "kda.fused_recurrent_kda.out.o": "kda.o",
    "self_attn.o_norm.in": "kda.o",
    "self_attn.o_norm": "kda.gated",
    "self_attn.o_proj.in_gated": "kda.gated",
}
MLA = {
    "self_attn.q_a_layernorm": "mla.q_latent",
    "self_attn.q_b_proj": "mla.q",
    "self_attn.attend.in.q": "mla.q",
    "self_attn.attend.out": "mla.heads",
    "self_attn.o_proj.in_gated": "mla.gated",
}
DENSE = {"mlp": "mlp", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.act_fn": "mlp.activated"}
MOE = {
    "block_sparse_moe": "mlp",
    "block_sparse_moe.routed_expert_down_proj": "moe.latent",
    "block_sparse_moe.routed_expert_norm.in": "moe.mixed",
    "block_sparse_moe.routed_expert_norm": "moe.norm",
    "block_sparse_moe.routed_expert_up_proj": "moe.up",
    "block_sparse_moe.shared_experts": "moe.shared",
    "block_sparse_moe.shared_experts.down_proj": "moe.shared",
    "block_sparse_moe.shared_experts.gate_proj": "moe.shared.gate",
    "block_sparse_moe.shared_experts.up_proj": "moe.shared.up",
    "block_sparse_moe.shared_experts.act_fn": "moe.shared.activated",
}
OUTER = {
    "model.output_attn_res.out": "output_mix",
    "model.norm": "final_norm",
    "lm_head": "logits",
    "logits": "logits",
}


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    return write_golden(tmp_path_factory.mktemp("golden"))


def decode_step(folder, dtype, probe):
    """Prompt 1..8, then id 9 watched by `probe`; returns (logits, state before, state after)."""
    with k3mlx.load(folder, dtype=dtype) as engine:
        backend = engine.backend
        _, before = backend.forward(range(1, 9), backend.new_state(), False, Hooks())
        logits, after = backend.forward([9], before, False, Hooks(probe=probe))
        return logits, before, after


@pytest.fixture(scope="module")
def watched(checkpoint_folder):
    stages = {}
    logits, before, after = decode_step(
        checkpoint_folder, "float64", lambda s, a: stages.setdefault(s, a.copy())
    )
    return stages, logits, before, after


@pytest.fixture(scope="module")
def captures():
    return dict(np.load(GOLDEN_RUN / "captures.npz"))


def comparisons(captures, stages, before, after, config, weights):
    """Yield (capture name, captured array, our array) for every capture that names a value of ours."""
    for layer in LAYERS:
        kda = config.layer_kinds[layer] == "kda"
        table = COMMON | (KDA if kda else MLA) | (MOE if config.is_moe(layer) else DENSE)
        for theirs, ours in table.items():
            name = f"model.layers.{layer}.{theirs}"
            if name in captures:
                yield name, captures[name], stages[f"layers.{layer}.{ours}"]
        for site in ("self_attention_res", "mlp_res"):
            name = f"model.layers.{layer}.{site}.fold"
            if name in captures:
                w = {
                    s: weights.load(f"model.layers.{layer}.{site}_{s}.weight", np.float64)
                    for s in ("norm", "proj")
                }
                yield name, captures[name], w["norm"] * w["proj"][0]
        prefix = f"model.layers.{layer}.self_attn."
        if kda:
            for row, stream in enumerate("qkv"):  # value-first there, oldest of four window rows unused
                window = captures[f"{prefix}{stream}_conv1d.1"][0, :, 1:]
                yield f"{prefix}{stream}_conv1d.1", window, after.layers[layer].windows[row].T
            recurrence = f"model.layers.{layer}.kda.fused_recurrent_kda."
            for name, state in (("in.initial_state", before), ("out.state", after)):
                yield recurrence + name, captures[recurrence + name], state.layers[layer].state.swapaxes(1, 2)
            yield recurrence + "in.g", captures[recurrence + "in.g"], stages[f"layers.{layer}.kda.z"]
        else:
            new = after.layers[layer].rows()[-1]
            latent = config.kv_lora_rank
            yield prefix + "kv_a_layernorm", captures[prefix + "kv_a_layernorm"], new[:latent]
            yield (
                prefix + "kv_a_proj_with_mqa (extra part)",
                captures[prefix + "kv_a_proj_with_mqa"][..., latent:],
                new[latent:],
            )
        if config.is_moe(layer):
            name = f"model.layers.{layer}.block_sparse_moe.gate.1"
            yield name, np.sort(captures[name]), np.sort(stages[f"layers.{layer}.moe.weights"])
    for theirs, ours in OUTER.items():
        yield theirs, captures[theirs], stages[ours]


def test_captures(watched, captures, checkpoint_folder):
    stages, _, before, after = watched
    compared = 0
    with Checkpoint.open(checkpoint_folder) as weights:
        for name, theirs, ours in comparisons(captures, stages, before, after, weights.config, weights):
            compared += 1
            ours = np.asarray(ours).reshape(theirs.shape)
            relative = np.abs(ours - theirs).max() / np.abs(theirs).max()
            assert relative <= 3e-5, f"{name}: relative error {relative:.2e}"
    print(f"{compared} of {len(captures)} captures compared")
    assert compared >= 120


def test_logits_float64(watched, captures):
    error = np.abs(watched[1] - captures["logits"].ravel()).max()
    print(f"float64 logits: {error:.2e}")
    assert error <= 5e-5


def test_logits_float32(checkpoint_folder, captures):
    logits, _, _ = decode_step(checkpoint_folder, "float32", lambda stage, array: None)
    error = np.abs(logits - captures["logits"].ravel()).max()
    print(f"float32 logits: {error:.2e}")
    assert error <= 3e-4
