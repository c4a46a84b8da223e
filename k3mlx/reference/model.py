"""Kimi K3 from token ids to logits in numpy: the oracle, and the CPU engine in float32.

Owns the order of the parts and the projections around them; the parts are in their own files. A
forward pass is pure: it returns logits and the next state, and leaves the given state usable.
Source: model specification §2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.clock import Clock, Stopwatch
from k3mlx.stages import Probe, no_probe, prefixed

from .attn_res import attn_res_mix
from .kda import kda_step
from .mla import attend, split_kv_b
from .moe import Experts, select_topk
from .ops import Array, products, rms_norm, sigmoid, situ_mlp
from .state import KdaState, LatentCache, LayerState, State
from .weights import LayerWeights, Weights, load_layer, load_outer


@dataclass
class Hooks:
    """What a caller may watch, and replace, in a forward pass.

    `before_layer(layer)` may raise to abandon the pass; `probe(stage, array)` sees every named
    intermediate, e.g. `layers.3.attention`; where `inject` has a stage, its value takes the place of the
    computed one (after `probe` has seen that). `clock` is told which part is running. `fed` are the ids
    before this pass, for a note of them should the process have to end. `settled`: a layer has been computed when
    `before_layer` is called for the next, which numpy's parts may otherwise leave for later.
    """

    before_layer: Callable[[int], None] = lambda layer: None
    probe: Callable[[str, NDArray[Any]], Any] = no_probe
    inject: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    fed: Sequence[int] = ()
    settled: bool = False

    @property
    def watched(self) -> bool:
        """Whether anybody looks at the stages."""
        return self.probe is not no_probe or bool(self.inject)


@dataclass(frozen=True)
class Residual:
    """What a layer hands on: frozen block vectors, oldest first, and the running sum, each [T, D] (§2.2)."""

    blocks: tuple[Array, ...]
    partial: Array


class Parts:
    """What there may be kernels for: here it is numpy's, and arguments and results are those of the functions named.

    Kernels may give a part's result as something that is computed later: it has a shape, can be added to, and is
    what other parts take; `np.asarray` is the array. After `settle` all that has been asked for is there.
    """

    def __init__(self) -> None:
        # recurrence and attention; other products are the weights' and the experts'
        self.stopwatch = Stopwatch()

    def begin(self, clock: Clock) -> None:
        """A pass, or a single layer or the head, begins; `clock` is that of the pass."""

    def settle(self) -> None:
        """Somebody needs all that has been computed, or the weights that were used go away."""

    def attn_res_mix(
        self, blocks: Sequence[Array], partial: Array, norm: Array, query: Array, eps: float
    ) -> Array:
        return attn_res_mix(blocks, partial, norm, query, eps)

    def kda_step(self, *arguments: Any) -> tuple[Array, Array, Array]:
        with self.stopwatch:
            return kda_step(*arguments)

    def attend(self, q: Array, rows: Array, kv_b: Array, nope: int, rank: int, scale: float) -> Array:
        """`mla.attend` for queries [T, H, n+e], the rows [S, r+e] of the cache and the maps as they are stored."""
        key_map, value_map = split_kv_b(kv_b, q.shape[1], nope)
        arrays = q[..., :nope], q[..., nope:], rows[:, :rank], rows[:, rank:], key_map, value_map
        with self.stopwatch:
            return attend(*arrays, scale)

    def select_topk(
        self, logits: Array, bias: Array, k: int, scaling: float
    ) -> tuple[NDArray[np.intp], Array]:
        return select_topk(logits, bias, k, scaling)

    def gated(self, x: Array, gate: Array) -> Array:
        return x * sigmoid(gate)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return rms_norm(x, weight, eps)

    def latent_rows(self, kv: Array, weight: Array, eps: float) -> Array:
        """Rows of the latent cache: the norm of the first columns of kv [T, r+e], for which there are weights [r]."""
        rank = len(weight)
        return np.concatenate([rms_norm(kv[:, :rank], weight, eps), kv[:, rank:]], axis=1)

    def fill(self, room: Array, rows: Array) -> None:
        room[...] = rows

    def products(self, x: Array, weights: Sequence[Array]) -> list[Array]:
        return products(x, weights)

    def product(self, x: Array, weight: Array) -> Array:
        return self.products(x, [weight])[0]

    def situ_mlp(
        self,
        x: Array,
        gate: Array,
        up: Array,
        down: Array,
        beta: float,
        linear_beta: float,
        probe: Probe = no_probe,
    ) -> Array:
        return situ_mlp(x, gate, up, down, beta, linear_beta, probe)


class ReferenceModel:
    """The text model with its dense weights in memory, in one dtype.

    `experts` fetches and applies the routed experts (see `moe.py`). `layers` and `outer`, loaded here if None, may
    read weights when their turn comes; `passing` says that a layer's are gone when the next is asked for. `parts`:
    kernels in place of numpy. `forward` is `embed`, each `layer` and `head`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        experts: Experts,
        dtype: np.dtype,
        layers: Sequence[LayerWeights] | None = None,
        outer: Mapping[str, Any] | None = None,
        parts: Parts | None = None,
        passing: bool = False,
    ) -> None:
        self.config = checkpoint.config
        self.parts = parts or Parts()
        self.passing = passing
        self.dtype = np.dtype(dtype)
        self.experts = experts
        self.outer = outer or load_outer(checkpoint, self.dtype)
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
        self.parts.begin(hooks.clock)
        residual = self.embed(ids)
        after: list[LayerState] = []
        for layer, old in enumerate(state.layers):
            hooks.before_layer(layer)
            residual, new = self._layer(layer, residual, old, hooks)
            after.append(new)
            if self.passing or hooks.settled:
                self.parts.settle()
        logits = self._head(residual, all_logits, hooks)
        return (logits if all_logits else logits[-1]), State(tuple(after), state.length + len(ids))

    def embed(self, ids: Sequence[int]) -> Residual:
        """The stream before layer 0."""
        return Residual((), self.outer["model.embed_tokens"][np.asarray(ids)])

    def layer(
        self, layer: int, residual: Residual, old: LayerState, hooks: Hooks
    ) -> tuple[Residual, LayerState]:
        """One layer for T tokens: the stream behind it and the layer's new state (§2.1)."""
        self.parts.begin(hooks.clock)
        after, new = self._layer(layer, residual, old, hooks)
        self.parts.settle()
        return Residual(tuple(map(np.asarray, after.blocks)), np.asarray(after.partial)), new

    def head(self, residual: Residual, all_logits: bool, hooks: Hooks) -> Array:
        """Logits [T, V] of the stream behind the last layer, or of its last token [1, V]."""
        self.parts.begin(hooks.clock)
        return self._head(residual, all_logits, hooks)

    def _layer(
        self, layer: int, residual: Residual, old: LayerState, hooks: Hooks
    ) -> tuple[Residual, LayerState]:
        config, eps, weights = self.config, self.config.rms_norm_eps, self.layers[layer]
        probe, norms, parts = prefixed(_probe(hooks), f"layers.{layer}."), weights.norms, self.parts
        hooks.clock.enter("attention")
        blocks, partial = residual.blocks, residual.partial
        query = norms["self_attention_res_proj"]
        h = parts.attn_res_mix(blocks, partial, norms["self_attention_res_norm"], query, eps)
        restart = layer % config.attn_res_block_size == 0
        if restart:
            blocks = (*blocks, partial)
        h = probe("attention_mix", h)
        x = probe("attention_norm", parts.rms_norm(h, norms["input_layernorm"], eps))
        new: LayerState
        if isinstance(old, KdaState):
            a, new = self._kda(x, weights.attention, old, probe)
        else:
            a, new = self._mla(x, weights.attention, old, probe)
        a = probe("attention", a)
        partial = a if restart else partial + a

        hooks.clock.enter("other")
        h = probe(
            "mlp_mix",
            parts.attn_res_mix(blocks, partial, norms["mlp_res_norm"], norms["mlp_res_proj"], eps),
        )
        x = probe("mlp_norm", parts.rms_norm(h, norms["post_attention_layernorm"], eps))
        if config.is_moe(layer):
            y = self._moe(x, layer, weights.ffn, probe, hooks.clock)
        else:
            hooks.clock.enter("mlp")
            y = self._mlp(x, weights.ffn, prefixed(probe, "mlp."))
        hooks.clock.enter("other")
        return Residual(blocks, probe("partial", partial + probe("mlp", y))), new

    def _head(self, residual: Residual, all_logits: bool, hooks: Hooks) -> Array:
        hooks.clock.enter("head")
        probe, outer, eps = _probe(hooks), self.outer, self.config.rms_norm_eps
        blocks, partial = residual.blocks, residual.partial
        if not all_logits and len(partial) > 1:
            blocks, partial = tuple(np.asarray(block)[-1:] for block in blocks), np.asarray(partial)[-1:]
        norm, query = outer["model.output_attn_res_norm"], outer["model.output_attn_res_proj"]
        y = probe("output_mix", self.parts.attn_res_mix(blocks, partial, norm, query, eps))
        y = probe("final_norm", self.parts.rms_norm(y, outer["model.norm"], eps))
        logits = np.asarray(probe("logits", self.parts.product(y, outer["lm_head"])))
        hooks.clock.enter("other")
        return logits

    def _kda(self, x: Array, w: Weights, old: KdaState, probe: Probe) -> tuple[Array, KdaState]:
        """KDA on the normed input x [T, D] -> [T, D] and the layer's new state (§2.3)."""
        probe = prefixed(probe, "kda.")
        names = [f"{name}_proj" for name in ("q", "k", "v", "f_a", "b", "g")]
        q, k, v, f, b, gate = self.parts.products(x, [w[name] for name in names])
        q, k, v = (probe(stream, array) for stream, array in zip("qkv", (q, k, v), strict=True))
        z = probe("z", self.parts.product(f, w["f_b_proj"]))  # no activation between the two factors
        b, gate = probe("b", b), probe("gate", gate)
        y, windows, state = self.parts.kda_step(
            q, k, v, z, b, gate, old.windows, old.state,
            w["taps"], w["A_log"], w["dt_bias"], w["o_norm"],
            self.config.gate_lower_bound, self.config.rms_norm_eps, self.config.l2_norm_eps, probe,
        )  # fmt: skip
        return self.parts.product(y, w["o_proj"]), KdaState(windows, state)

    def _mla(self, x: Array, w: Weights, old: LatentCache, probe: Probe) -> tuple[Array, LatentCache]:
        """MLA on the normed input x [T, D] -> [T, D] and the layer's longer cache (§2.5)."""
        config, parts, probe = self.config, self.parts, prefixed(probe, "mla.")
        heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        names = "q_a_proj", "kv_a_proj_with_mqa", "g_proj"
        q_latent, kv, gate = parts.products(x, [w[name] for name in names])  # kv [T, r+e]
        q_latent = probe("q_latent", parts.rms_norm(q_latent, w["q_a_layernorm"], config.mla_norm_eps))
        q = parts.product(q_latent, w["q_b_proj"])
        q = probe("q", q.reshape(len(x), heads, config.qk_head_dim))
        new = probe("cache", parts.latent_rows(kv, w["kv_a_layernorm"], config.mla_norm_eps))
        cache = old.append(new, parts.fill)
        o = parts.attend(q, cache.rows(), w["kv_b_proj"], nope, rank, config.qk_head_dim**-0.5)
        o, gate = probe("heads", o), probe("gate", gate)
        y = probe("gated", parts.gated(o.reshape(len(x), heads * config.v_head_dim), gate))
        return parts.product(y, w["o_proj"]), cache

    def _mlp(self, x: Array, w: Weights, probe: Probe, prefix: str = "") -> Array:
        return self.parts.situ_mlp(
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
        config, parts, probe = self.config, self.parts, prefixed(probe, "moe.")
        clock.enter("router")
        ids, scores = parts.select_topk(
            probe("logits", parts.product(x, w["gate"])), w["gate.e_score_correction_bias"],
            config.num_experts_per_token, config.routed_scaling_factor,
        )  # fmt: skip
        ids, scores = probe("ids", ids), probe("weights", scores)
        # they may be read from disk while we go on
        mix = self.experts.start(layer, np.asarray(x), ids, scores)
        clock.enter("mlp")
        shared = self._mlp(x, w, prefixed(probe, "shared."), "shared_experts.")
        latent = probe("latent", parts.product(x, w["routed_expert_down_proj"]))
        clock.enter("experts")
        mixed = probe("mixed", mix(latent))
        clock.enter("mlp")
        routed = probe("norm", parts.rms_norm(mixed, w["routed_expert_norm"], config.rms_norm_eps))
        return probe("up", parts.product(routed, w["routed_expert_up_proj"])) + probe("shared", shared)


def _probe(hooks: Hooks) -> Probe:
    """Shows a stage to the hooks and returns it, or what they have in its place."""
    if not hooks.watched:
        return no_probe

    def probe(stage: str, array: NDArray[Any]) -> NDArray[Any]:
        array = np.asarray(array)
        hooks.probe(stage, array)
        given = hooks.inject.get(stage)
        return array if given is None else given.astype(array.dtype)

    return probe
