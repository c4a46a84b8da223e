"""Kimi K3 from token ids to logits in numpy: the oracle, and the CPU engine in float32.

Owns the order of the parts and the projections around them; the parts are in their own files. A
forward pass is pure: it returns logits and the next state, and leaves the given state usable.
Source: model specification §2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.clock import Clock

from .attn_res import attn_res_mix
from .kda import kda_step
from .mla import attend, split_kv_b
from .moe import Experts, route_topk
from .ops import Array, Probe, no_probe, rms_norm, sigmoid, situ_mlp
from .state import KdaState, LatentCache, LayerState, State
from .weights import LayerWeights, Weights, load_layer, load_outer


@dataclass
class Hooks:
    """What a caller may watch in a forward pass.

    `before_layer(layer)` may raise to abandon the pass; `probe(stage, array)` sees every named
    intermediate, e.g. `layers.3.attention`; `clock` is told which part is running. `fed` are the ids
    before this pass, for a note of them should the process have to end.
    """

    before_layer: Callable[[int], None] = lambda layer: None
    probe: Probe = no_probe
    clock: Clock = field(default_factory=Clock)
    fed: Sequence[int] = ()


class ReferenceModel:
    """The text model with its dense weights in memory, in one dtype.

    `experts` fetches and applies the routed experts (see `moe.py`). `layers`, all loaded here if None, may
    read a layer's weights when its turn comes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        experts: Experts,
        dtype: np.dtype,
        layers: Sequence[LayerWeights] | None = None,
    ) -> None:
        self.config = checkpoint.config
        self.dtype = np.dtype(dtype)
        self.experts = experts
        self.outer = load_outer(checkpoint, self.dtype)
        numbers = range(self.config.num_hidden_layers)
        self.layers = layers or [load_layer(checkpoint, n, self.dtype) for n in numbers]

    def new_state(self) -> State:
        return State.empty(self.config, self.dtype)

    def forward(
        self, ids: Sequence[int], state: State, all_logits: bool = False, hooks: Hooks | None = None
    ) -> tuple[Array, State]:
        """Run T tokens after `state`.

        Returns (logits [V], or [T, V] with all_logits; the state after these tokens).
        """
        hooks = hooks or Hooks()
        config, eps = self.config, self.config.rms_norm_eps
        partial = self.outer["model.embed_tokens"][np.asarray(ids)]  # [T, D]
        blocks: list[Array] = []
        after: list[LayerState] = []
        for layer, weights in enumerate(self.layers):
            hooks.before_layer(layer)
            probe = _prefixed(hooks.probe, f"layers.{layer}.")
            norms = weights.norms
            hooks.clock.enter("attention")
            h = attn_res_mix(
                blocks, partial, norms["self_attention_res_norm"], norms["self_attention_res_proj"], eps
            )
            restart = layer % config.attn_res_block_size == 0
            if restart:
                blocks.append(partial)
            x = rms_norm(h, norms["input_layernorm"], eps)
            probe("attention_mix", h)
            probe("attention_norm", x)
            old = state.layers[layer]
            new: LayerState
            if isinstance(old, KdaState):
                a, new = self._kda(x, weights.attention, old, probe)
            else:
                a, new = self._mla(x, weights.attention, old, probe)
            probe("attention", a)
            after.append(new)
            partial = a if restart else partial + a

            hooks.clock.enter("other")
            h = attn_res_mix(blocks, partial, norms["mlp_res_norm"], norms["mlp_res_proj"], eps)
            x = rms_norm(h, norms["post_attention_layernorm"], eps)
            probe("mlp_mix", h)
            probe("mlp_norm", x)
            if config.is_moe(layer):
                y = self._moe(x, layer, weights.ffn, probe, hooks.clock)
            else:
                y = self._mlp(x, weights.ffn, _prefixed(probe, "mlp."))
            probe("mlp", y)
            partial = partial + y
            probe("partial", partial)

        hooks.clock.enter("head")
        if not all_logits:
            partial, blocks = partial[-1:], [block[-1:] for block in blocks]
        outer = self.outer
        y = attn_res_mix(
            blocks, partial, outer["model.output_attn_res_norm"], outer["model.output_attn_res_proj"], eps
        )
        hooks.probe("output_mix", y)
        y = rms_norm(y, outer["model.norm"], eps)
        hooks.probe("final_norm", y)
        logits = y @ outer["lm_head"].T
        hooks.probe("logits", logits)
        hooks.clock.enter("other")
        return (logits if all_logits else logits[-1]), State(tuple(after), state.length + len(ids))

    def _kda(self, x: Array, w: Weights, old: KdaState, probe: Probe) -> tuple[Array, KdaState]:
        """KDA on the normed input x [T, D] -> [T, D] and the layer's new state (§2.3)."""
        q, k, v = (x @ w[f"{stream}_proj"].T for stream in "qkv")
        z = x @ w["f_a_proj"].T @ w["f_b_proj"].T  # no activation between the two factors
        b = x @ w["b_proj"].T
        gate = x @ w["g_proj"].T
        for stage, array in (("q", q), ("k", k), ("v", v), ("z", z), ("b", b), ("gate", gate)):
            probe(f"kda.{stage}", array)
        y, windows, state = kda_step(
            q, k, v, z, b, gate, old.windows, old.state,
            w["taps"], w["A_log"], w["dt_bias"], w["o_norm"],
            self.config.gate_lower_bound, self.config.rms_norm_eps, self.config.l2_norm_eps,
            _prefixed(probe, "kda."),
        )  # fmt: skip
        probe("kda.windows", windows)
        probe("kda.state", state)
        probe("kda.gated", y)
        return y @ w["o_proj"].T, KdaState(windows, state)

    def _mla(self, x: Array, w: Weights, old: LatentCache, probe: Probe) -> tuple[Array, LatentCache]:
        """MLA on the normed input x [T, D] -> [T, D] and the layer's longer cache (§2.5)."""
        config = self.config
        heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        q_latent = rms_norm(x @ w["q_a_proj"].T, w["q_a_layernorm"], config.mla_norm_eps)
        q = (q_latent @ w["q_b_proj"].T).reshape(len(x), heads, config.qk_head_dim)
        kv = x @ w["kv_a_proj_with_mqa"].T  # [T, r+e]
        latent = rms_norm(kv[:, :rank], w["kv_a_layernorm"], config.mla_norm_eps)
        cache = old.append(np.concatenate([latent, kv[:, rank:]], axis=1))
        rows = cache.rows()  # [S, r+e]
        probe("mla.q_latent", q_latent)
        probe("mla.q", q)
        probe("mla.cache", rows)
        key_map, value_map = split_kv_b(w["kv_b_proj"], heads, nope)
        o = attend(
            q[..., :nope], q[..., nope:], rows[:, :rank], rows[:, rank:], key_map, value_map,
            config.qk_head_dim**-0.5,
        )  # fmt: skip
        probe("mla.heads", o)
        y = o.reshape(len(x), heads * config.v_head_dim) * sigmoid(x @ w["g_proj"].T)
        probe("mla.gated", y)
        return y @ w["o_proj"].T, cache

    def _mlp(self, x: Array, w: Weights, probe: Probe, prefix: str = "") -> Array:
        return situ_mlp(
            x,
            w[f"{prefix}gate_proj"],
            w[f"{prefix}up_proj"],
            w[f"{prefix}down_proj"],
            self.config.activation_situ_beta,
            self.config.activation_situ_linear_beta,
            probe,
        )

    def _moe(self, x: Array, layer: int, w: Weights, probe: Probe, clock: Clock) -> Array:
        """Latent mixture of experts on the normed input x [T, D] -> [T, D] (§2.6.2)."""
        config = self.config
        ids, scores = route_topk(
            x, w["gate"], w["gate.e_score_correction_bias"],
            config.num_experts_per_token, config.routed_scaling_factor,
        )  # fmt: skip
        probe("moe.ids", ids)
        probe("moe.weights", scores)
        mix = self.experts.start(layer, x, ids, scores)  # they may be read from disk while we go on
        shared = self._mlp(x, w, _prefixed(probe, "moe.shared."), "shared_experts.")
        latent = x @ w["routed_expert_down_proj"].T
        clock.enter("experts")
        mixed = mix(latent)
        clock.enter("other")
        routed = rms_norm(mixed, w["routed_expert_norm"], config.rms_norm_eps)
        up = routed @ w["routed_expert_up_proj"].T
        stages = (("latent", latent), ("mixed", mixed), ("norm", routed), ("up", up), ("shared", shared))
        for stage, array in stages:
            probe(f"moe.{stage}", array)
        return up + shared


def _prefixed(probe: Probe, prefix: str) -> Probe:
    return probe if probe is no_probe else lambda stage, array: probe(prefix + stage, array)
