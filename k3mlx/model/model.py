"""Kimi K3 from token ids to logits in MLX: the order of the parts, and where the host waits.

Owns the step. It is pure: it gives logits and the update of every layer and writes nothing that outlives
it. Each layer with experts ends one evaluation, whose router results the host needs; the shared experts
run on while the routed ones compute. Source: model specification §2; numerics §3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from k3mlx.config import ModelConfig
from k3mlx.dense import LayerRing, stored_sizes
from k3mlx.errors import K3Error
from k3mlx.experts.store import ExpertStore
from k3mlx.kernels.cpu import CpuKernels
from k3mlx.kernels.plain import router_logits
from k3mlx.ranks.lead import Total, Whole
from k3mlx.reference.model import Hooks
from k3mlx.stages import Probe, no_probe, prefixed

from .kda import kda
from .mla import Span, attend
from .ops import Matrix, OnDisk, Quantized, Weights, gated_on, linear, rms_norm, rows, situ_mlp
from .room import Room
from .routed import RoutedExperts
from .state import KdaState, LatentCache, LayerState, State, Update
from .weights import Loader

HEAD_ELEMENTS = 1 << 26  # numbers of the head widened to float32 at once


@dataclass(frozen=True)
class Residual:
    """What a layer hands on: frozen block vectors [N, T, D], None for N = 0, and the running sum [T, D] (§2.2)."""

    blocks: mx.array | None
    partial: mx.array


class MlxModel:
    """The text model with its dense weights as MLX arrays of one dtype, its routed experts in a store.

    `resident` layers keep their weights in memory (None: all), others are read at each use. `native`: C kernels for
    the experts that the room has no streams for. Made by the thread
    that owns MLX. A step is `embed`, each `layer` and `head`.
    """

    def __init__(
        self,
        loader: Loader,
        store: ExpertStore,
        room: Room,
        resident: Collection[int] | None = None,
        native: CpuKernels | None = None,
    ) -> None:
        self.config: ModelConfig = loader.config
        self.dtype = loader.dtype
        self.room = room
        self._store = store
        self._routed = RoutedExperts(store, self.config, room, native)
        self.outer = loader.outer()
        sizes = stored_sizes(loader.checkpoint, loader.part)
        kept = set(range(len(sizes)) if resident is None else resident)
        streamed = [n for n in range(len(sizes)) if n not in kept]
        if not loader.thin:
            loader.stream(streamed, lambda: room.evaluations)
        self.layers = LayerRing(
            lambda n: loader.begin(n, lend=n not in kept), sizes, kept, loader.drop, ahead=not loader.thin
        )
        if not streamed:
            loader.close()
        self._loader = loader

    def step(
        self, ids: Sequence[int], state: State, all_logits: bool, hooks: Hooks
    ) -> tuple[np.ndarray, list[Update]]:
        """Run T tokens after `state`: (logits [V], or [T, V] with all_logits, float32; updates to commit)."""
        residual = self.embed(ids)
        span = Span.of(state.layers, len(ids))  # the same for every MLA layer of a step
        updates: list[Update] = []
        for layer, old in enumerate(state.layers):
            hooks.before_layer(layer)
            residual, update = self.layer(layer, residual, old, hooks, span)
            updates.append(update)
        logits = self.head(residual, all_logits, hooks)
        tail = [array for update in updates for array in update_arrays(update)]
        self.room.evaluate(
            "the head",
            [logits, tail],
            self.room.deadline(len(ids) * self.config.vocab_size * self.config.hidden_size),
        )
        hooks.clock.enter("other")
        host = np.array(logits)
        return (host if all_logits else host[0]), updates

    def embed(self, ids: Sequence[int]) -> Residual:
        """The stream before layer 0."""
        table = self.outer["model.embed_tokens"]
        return Residual(None, rows(table, mx.array(np.asarray(ids, np.int32)), self.dtype))

    def layer(
        self, layer: int, residual: Residual, old: LayerState, hooks: Hooks, span: Span | None
    ) -> tuple[Residual, Update]:
        """One layer for T tokens: the stream behind it and the update of the layer's state (§2.1).

        span: what the tokens of this step attend to; for KDA layers it may be None.
        """
        probe, norms = prefixed(_probe(hooks), f"layers.{layer}."), self.layers[layer].norms
        blocks, partial = residual.blocks, residual.partial
        hooks.clock.enter("attention")
        h, x = self._mix(blocks, partial, norms, "self_attention_res", "input_layernorm")
        restart = layer % self.config.attn_res_block_size == 0
        if restart:
            blocks = partial[None] if blocks is None else mx.concatenate([blocks, partial[None]])
        probe("attention_mix", h)
        x = probe("attention_norm", x)
        with self._share("attention", layer, x) as whole:
            a, update = self.attention(x, layer, old, span, probe)
            a = probe("attention", whole(a))
        partial = a if restart else partial + a
        h, x = self._mix(blocks, partial, norms, "mlp_res", "post_attention_layernorm")
        probe("mlp_mix", h)
        x = probe("mlp_norm", x)
        if self.config.is_moe(layer):
            y = self._moe(x, layer, prefixed(probe, "moe."), hooks, update_arrays(update, partial, x))
        else:
            hooks.clock.enter("mlp")
            with self._share("mlp", layer, x) as whole:
                y = whole(self.dense_mlp(x, layer, prefixed(probe, "mlp.")))
        hooks.clock.enter("other")
        return Residual(blocks, probe("partial", partial + probe("mlp", y))), update

    def close(self) -> None:
        """Wait for reads in progress and let go of the layers and their files."""
        self.layers.close()
        self._loader.close()

    def formats(self) -> dict[str, str]:
        """How the matrices of each part are kept, in the order of the report (the experts' place is empty)."""
        kinds = self.config.layer_kinds
        layers = [self.layers.resident(n) or self._loader.sketch(n) for n in range(len(kinds))]
        found: dict[str, list[Any]] = {
            "kda": [
                w for n, layer in enumerate(layers) if kinds[n] == "kda" for w in layer.attention.values()
            ],
            "mla": [
                w for n, layer in enumerate(layers) if kinds[n] == "mla" for w in layer.attention.values()
            ],
            "attn_res_mix": [layer.norms["mlp_res_proj"] for layer in layers],
            "dense_mlp": [
                w for n, layer in enumerate(layers) if not self.config.is_moe(n) for w in layer.ffn.values()
            ],
            "router": [layer.ffn["gate"] for layer in layers if "gate" in layer.ffn],
            "experts": [],
            "shared_experts": [w for layer in layers for name, w in layer.ffn.items() if "shared" in name],
            "head": [self.outer["lm_head"]],
        }
        return {part: ", ".join(dict.fromkeys(map(_format, weights))) for part, weights in found.items()}

    def attention(
        self, x: mx.array, layer: int, old: LayerState, span: Span | None, probe: Probe
    ) -> tuple[mx.array, Update]:
        """What the heads of this process add to the stream for the normed input x [T, D], and the layer's update."""
        w = self.layers[layer].attention
        if isinstance(old, KdaState):
            self.room.enter("kda")
            return kda(x, w, old, self.config, self.room.kernels, prefixed(probe, "kda."))
        self.room.enter("mla")
        assert span is not None, "an MLA layer needs a span"
        return self._mla(x, w, old, span, prefixed(probe, "mla."))

    def _mla(
        self, x: mx.array, w: Weights, old: LatentCache, span: Span, probe: Probe
    ) -> tuple[mx.array, mx.array]:
        """MLA on the normed input x [T, D] -> [T, D] and the rows [T, r+e] to be cached (§2.5)."""
        config = self.config
        heads, nope, rank = w["U"].shape[0], config.qk_nope_head_dim, config.kv_lora_rank
        q_latent = rms_norm(linear(x, w["q_a_proj"]), w["q_a_layernorm"], config.mla_norm_eps)
        q = linear(probe("q_latent", q_latent), w["q_b_proj"])
        q = probe("q", q.reshape(x.shape[0], heads, config.qk_head_dim))
        kv = linear(x, w["kv_a_proj_with_mqa"])  # [T, r+e]
        latent = rms_norm(kv[:, :rank], w["kv_a_layernorm"], config.mla_norm_eps)
        new = probe("cache", mx.concatenate([latent, kv[:, rank:]], axis=1))
        o = attend(
            q[..., :nope],
            q[..., nope:],
            old.buffer.rows,
            new,
            w["U"],
            w["O"],
            config.qk_head_dim**-0.5,
            span,
        )
        o, gate = probe("heads", o), probe("gate", linear(x, w["g_proj"]))
        y = probe("gated", gated_on(self.room.kind)(o.reshape(x.shape[0], -1), gate))
        return linear(y, w["o_proj"]), new

    def _mix(
        self, blocks: mx.array | None, partial: mx.array, norms: Weights, site: str, norm: str
    ) -> tuple[mx.array, mx.array]:
        """The depth mix at a site and the norm behind it, both [T, D] (§2.2)."""
        self.room.enter("attn_res_mix")
        return self.room.kernels.attn_res_mix(
            blocks,
            partial,
            norms[f"{site}_norm"],
            norms[f"{site}_proj"],
            self.config.rms_norm_eps,
            norms[norm],
        )

    def dense_mlp(self, x: mx.array, layer: int, probe: Probe) -> mx.array:
        """The MLP of a layer without experts, or this process's widths of it, on x [T, D] -> [T, D]."""
        self.room.enter("dense_mlp")
        return self._mlp(x, self.layers[layer].ffn, probe)

    def shared_experts(self, x: mx.array, layer: int, probe: Probe) -> mx.array:
        """The shared experts of a layer, or this process's widths of them, on x [T, D] -> [T, D]."""
        self.room.enter("shared_experts")
        return self._mlp(x, self.layers[layer].ffn, probe, "shared_experts.")

    def _mlp(self, x: mx.array, w: Weights, probe: Probe, prefix: str = "") -> mx.array:
        return situ_mlp(
            x,
            w[f"{prefix}gate_proj"],
            w[f"{prefix}up_proj"],
            w[f"{prefix}down_proj"],
            self.config.activation_situ_beta,
            self.config.activation_situ_linear_beta,
            probe,
            self.room.kind,
        )

    def _moe(self, x: mx.array, layer: int, probe: Probe, hooks: Hooks, pending: list[mx.array]) -> mx.array:
        """Latent mixture of experts on the normed input x [T, D] -> [T, D] (§2.6.2).

        Evaluates everything up to here (`pending` with it), as the host has to know the experts.
        """
        config, room, w = self.config, self.room, self.layers[layer].ffn
        room.enter("router")
        ids, scores, flags = self._route(x, w, probe)
        ids, scores = probe("ids", ids), probe("weights", scores)
        latent = probe("latent", linear(x, w["routed_expert_down_proj"]))
        wide = latent.astype(mx.float32)
        weights_read = sum(array.size for array in (*w.values(), *self.layers[layer].attention.values()))
        seconds = room.deadline(x.shape[0] * weights_read)
        guess = self._guess(layer, x)
        room.evaluate(
            f"layer {layer}: attention and router", [ids, scores, flags, wide, pending, guess], seconds
        )
        if np.array(flags).any() and not hooks.watched:
            raise K3Error(f"layer {layer}: a router score is NaN: the weights are damaged")
        chosen, weights = np.array(ids), np.array(scores)
        request = self._routed.request(layer, chosen, room.ranks.own(layer, np.unique(chosen).tolist()))
        with request, self._spread(layer, wide, chosen, weights, x) as total:  # reads are on their way
            for likely in guess:
                self._store.guess(layer + 1, room.ranks.own(layer + 1, np.array(likely)[0].tolist()))
            hooks.clock.enter("mlp")
            shared = self.shared_experts(x, layer, prefixed(probe, "shared."))
            mx.async_eval(shared)
            hooks.clock.enter("experts")
            summed, shared = total(self._routed.mix(layer, wide, chosen, weights, request), shared)
        hooks.clock.enter("mlp")
        mixed = probe("mixed", mx.array(summed))
        routed = rms_norm(mixed.astype(x.dtype), w["routed_expert_norm"], config.rms_norm_eps)
        up = linear(probe("norm", routed), w["routed_expert_up_proj"])
        return probe("up", up) + probe("shared", shared)

    def _spread(
        self, layer: int, latent: mx.array, ids: np.ndarray, weights: np.ndarray, x: mx.array
    ) -> AbstractContextManager[Total]:
        """The other ranks compute their part of the experts meanwhile."""
        seconds = self.room.deadline(latent.size * self.config.moe_intermediate_size * ids.shape[1])
        return self.room.ranks.spread(
            layer, latent, ids, weights, x,
            lambda arrays: self.room.evaluate(f"layer {layer}: the other ranks' experts", arrays, seconds),
        )  # fmt: skip

    def _share(self, what: str, layer: int, x: mx.array) -> AbstractContextManager[Whole]:
        """The other ranks compute their part of an attention, MLP or head meanwhile, if they have any."""
        config, room = self.config, self.room
        inner = (
            config.vocab_size if what == "head" else 3 * max(config.intermediate_size, config.kda_projection)
        )
        seconds = room.deadline(x.size * inner)
        return room.ranks.share(
            what, layer, x, lambda arrays: room.evaluate(f"layer {layer}: the ranks' {what}", arrays, seconds)
        )

    def _guess(self, layer: int, x: mx.array) -> list[mx.array]:
        """Likely experts [T, k] of the next layer, by its router on this layer's input; [] if not wanted."""
        following = layer + 1
        if following == self.config.num_hidden_layers or not self._store.streams:
            return []
        weights = self.layers.resident(following)
        if weights is None or not self._store.lookahead.wanted(layer, x.shape[0]):
            return []
        return [self._route(x, weights.ffn, no_probe)[0]]

    def _route(self, x: mx.array, w: Weights, probe: Probe) -> tuple[mx.array, mx.array, mx.array]:
        """ids [T, k], weights [T, k] and flags [T] of the chosen experts; logits in float32."""
        config, gate, bias = self.config, w["gate"], w["gate.e_score_correction_bias"]
        count, scaling = config.num_experts_per_token, config.routed_scaling_factor
        if isinstance(gate, Quantized):
            logits = linear(x.astype(mx.float32), gate).astype(mx.float32)
        else:
            logits = router_logits(x, gate)
        return self.room.kernels.select_topk(probe("logits", logits), bias, count, scaling)

    def head(self, residual: Residual, all_logits: bool, hooks: Hooks) -> mx.array:
        """Logits [T, V] in float32 of the stream behind the last layer, or of its last token [1, V]."""
        hooks.clock.enter("head")
        probe, blocks, partial = _probe(hooks), residual.blocks, residual.partial
        if not all_logits:
            partial, blocks = partial[-1:], None if blocks is None else blocks[:, -1:]
        outer = self.outer
        self.room.enter("attn_res_mix")
        mixed, y = self.room.kernels.attn_res_mix(
            blocks, partial, outer["model.output_attn_res_norm"], outer["model.output_attn_res_proj"],
            self.config.rms_norm_eps, outer["model.norm"],
        )  # fmt: skip
        probe("output_mix", mixed)
        y = probe("final_norm", y)
        with self._share("head", self.config.num_hidden_layers, y) as whole:
            return probe("logits", whole(self.logits(y)))

    def logits(self, y: mx.array) -> mx.array:
        """The logits of y [T, D] in float32, or those of this process's rows of the head."""
        self.room.enter("head")
        seconds = self.room.deadline(y.shape[0] * self.config.vocab_size * self.config.hidden_size)
        return head(y, self.outer["lm_head"], lambda block: self.room.evaluate("the head", block, seconds))


def head(y: mx.array, w: Matrix | OnDisk, evaluate: Callable[[list[mx.array]], None]) -> mx.array:
    """Logits [T, V] in float32 of y [T, D].

    bf16 rows of w are widened a block at a time, each evaluated before the next, so they never exist as a whole.
    """
    y = y.astype(mx.float32)
    if isinstance(w, Quantized) or (w.dtype == mx.float32 and not isinstance(w, OnDisk)):
        return linear(y, w).astype(mx.float32)
    blocks = []
    for block in _row_blocks(w):
        blocks.append(y @ block.astype(mx.float32).T)
        evaluate(blocks[-1:])
    return mx.concatenate(blocks, axis=1)


def _row_blocks(w: mx.array | OnDisk) -> Iterator[mx.array]:
    if isinstance(w, OnDisk):
        yield from w.pieces()
        return
    step = max(1, HEAD_ELEMENTS // w.shape[1])
    for start in range(0, w.shape[0], step):
        yield w[start : start + step]


def _format(w: Any) -> str:
    return w.format() if isinstance(w, Quantized) else str(w.dtype).removeprefix("mlx.core.")


def update_arrays(update: Update, *more: mx.array) -> list[mx.array]:
    """The arrays of an update and more, to be evaluated."""
    return [*([update.windows, update.state] if isinstance(update, KdaState) else [update]), *more]


def _probe(hooks: Hooks) -> Probe:
    """Shows a stage to the hooks, in numpy (bf16 as float32), and returns it, or what they have in its place."""
    if not hooks.watched:
        return no_probe

    def probe(stage: str, array: mx.array) -> mx.array:
        hooks.probe(stage, np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array))
        given = hooks.inject.get(stage)
        if given is None:
            return array
        return mx.array(given.astype(np.float32 if given.dtype.kind == "f" else np.int32)).astype(array.dtype)

    return probe
