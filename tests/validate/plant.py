"""Faults for `validate` to find: a function of the model that goes wrong in one layer of one path.

Owns the switch that is on while the layer runs, and the faults of the two backends, each with the stage that has
to be named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

HEAD = "head"
Change = Callable[..., Any]  # (original, *arguments) -> what the faulty function gives


class Fault(NamedTuple):
    """`function` of `owner` (a module, or a class in one) goes wrong at its calls number `nth` within a layer
    (None: all of them)."""

    stage: str
    owner: str
    function: str
    change: Change
    nth: int | None = None


class Planted:
    """A path whose layer `where` (or head) has a fault."""

    def __init__(self, path: Any, where: int | str) -> None:
        self._path = path
        self._where = where
        self._on = False
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path, name)

    def layer(self, layer: int, *arguments: Any) -> Any:
        return self._switched(layer == self._where, self._path.layer, layer, *arguments)

    def head(self, *arguments: Any) -> Any:
        return self._switched(self._where == HEAD, self._path.head, *arguments)

    def wrap(self, original: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if not self._on:
                return original(*arguments, **keywords)
            self._calls += 1
            if fault.nth is not None and self._calls - 1 != fault.nth:
                return original(*arguments, **keywords)
            return fault.change(original, *arguments, **keywords)

        return wrapped

    def _switched(self, on: bool, call: Callable[..., Any], *arguments: Any) -> Any:
        self._on, self._calls = on, 0
        try:
            return call(*arguments)
        finally:
            self._on = False


def scaled(original, *arguments, **keywords):
    return original(*arguments, **keywords) * 1.1


def second_scaled(original, *arguments):
    mixed, normed = original(*arguments)
    return mixed, normed * 1.1


def swapped_taps(original, u, window, taps):
    return original(u, window, taps[:, ::-1])


def other_bound(original, *arguments):
    *rest, bound, eps, l2_eps, probe = arguments
    return original(*rest, bound * 0.9, eps, l2_eps, probe)


def no_l2_norm(original, x, eps):
    return x


def transposed_state(original, *arguments):
    out, state = original(*arguments)
    return out, state.swapaxes(-1, -2)


def gate_upside_down(original, q, k, v, z, b, gate, *rest):
    return original(q, k, v, z, b, -gate, *rest)


def no_oldest_block(original, blocks, *rest):
    return original(blocks[1:], *rest)


def biased_weights(original, logits, bias, k, scaling):
    ids, *_ = chosen = original(logits, bias, k, scaling)
    weights = original(logits + bias, 0 * bias, k, scaling)[1]
    return (ids, weights, *chosen[2:])


def no_bias(original, logits, bias, k, scaling):
    return original(logits, 0 * bias, k, scaling)


def other_beta(original, gate, up, beta, linear_beta):
    return original(gate, up, beta * 0.5, linear_beta)


def up_for_gate(original, x, w_gate, w_up, *rest, **keywords):
    return original(x, w_up, w_gate, *rest, **keywords)


def turned_keys(original, q_nope, q_ext, *rest):
    """What a rotation by position would do to the part of the query that has none in this model."""
    half = q_ext.shape[-1] // 2
    turned = q_ext * 0
    turned[..., :half], turned[..., half:] = -q_ext[..., half:], q_ext[..., :half]
    return original(q_nope, turned, *rest)


def no_shared_experts(original, self, x, layer, w, *rest):
    from k3mlx.stages import no_probe

    return original(self, x, layer, w, *rest) - self._mlp(x, w, no_probe, "shared_experts.")


def no_shared_experts_mlx(original, self, x, layer, *rest):
    from k3mlx.stages import no_probe

    return original(self, x, layer, *rest) - self.shared_experts(x, layer, no_probe)


def heavier(original, ids, weights):
    return original(ids, weights * 1.1)


def ungated(original, *arguments):
    x = original(*arguments)
    return 1 - x


def gated_twice(original, device):
    return lambda x, gate: original(device)(original(device)(x, gate), gate)


KDA, MLA = 3, 2  # layers of each kind that have experts and more than one frozen block
_R, _M = "k3mlx.reference", "k3mlx.model"
_PLAIN = "k3mlx.kernels.plain"

NUMPY = [
    (KDA, Fault("attention_norm", f"{_R}.model", "rms_norm", scaled, 0)),
    (KDA, Fault("attention_mix", f"{_R}.model", "attn_res_mix", no_oldest_block, 0)),
    (MLA, Fault("mlp_mix", f"{_R}.model", "attn_res_mix", no_oldest_block, 1)),
    (KDA, Fault("kda.k_conv", f"{_R}.kda", "short_conv", swapped_taps, 1)),
    (KDA, Fault("kda.g", f"{_R}.model", "kda_step", other_bound)),
    (KDA, Fault("kda.k_unit", f"{_R}.kda", "l2_norm", no_l2_norm, 1)),
    (KDA, Fault("kda.state", f"{_R}.kda", "kda_recurrent", transposed_state)),
    (KDA, Fault("kda.gated", f"{_R}.model", "kda_step", gate_upside_down)),
    (MLA, Fault("mla.cache", f"{_R}.model", "rms_norm", scaled, 2)),
    (MLA, Fault("mla.heads", f"{_R}.model", "attend", turned_keys)),
    (MLA, Fault("mla.gated", f"{_R}.model", "sigmoid", ungated)),
    (KDA, Fault("moe.ids", f"{_R}.model", "select_topk", no_bias)),
    (MLA, Fault("moe.weights", f"{_R}.model", "select_topk", biased_weights)),
    (KDA, Fault("moe.shared.activated", f"{_R}.ops", "situ", other_beta, 0)),
    (MLA, Fault("moe.mixed", "k3mlx.experts.compute", "situ_mlp", up_for_gate)),
    (KDA, Fault("mlp", f"{_R}.model.ReferenceModel", "_moe", no_shared_experts)),
    (HEAD, Fault("final_norm", f"{_R}.model", "rms_norm", scaled)),
]

MLX = [
    (KDA, Fault("attention_norm", _PLAIN, "attn_res_mix", second_scaled, 0)),
    (KDA, Fault("attention_mix", _PLAIN, "attn_res_mix", no_oldest_block, 0)),
    (MLA, Fault("mlp_mix", _PLAIN, "attn_res_mix", no_oldest_block, 1)),
    (KDA, Fault("kda.k_conv", _PLAIN, "short_conv", swapped_taps, 1)),
    (KDA, Fault("kda.g", _PLAIN, "kda_step", other_bound)),
    (KDA, Fault("kda.k_unit", _PLAIN, "_l2_norm", no_l2_norm, 1)),
    (KDA, Fault("kda.state", _PLAIN, "_recurrent", transposed_state)),
    (KDA, Fault("kda.gated", _PLAIN, "kda_step", gate_upside_down)),
    (MLA, Fault("mla.cache", f"{_M}.model", "rms_norm", scaled, 1)),
    (MLA, Fault("mla.heads", f"{_M}.model", "attend", turned_keys)),
    (MLA, Fault("mla.gated", f"{_M}.model", "gated_on", gated_twice)),
    (KDA, Fault("moe.ids", _PLAIN, "select_topk", no_bias)),
    (MLA, Fault("moe.weights", _PLAIN, "select_topk", biased_weights)),
    (KDA, Fault("moe.shared.activated", f"{_M}.ops", "situ", other_beta, 0)),
    (MLA, Fault("moe.mixed", f"{_M}.moe", "situ_mlp", up_for_gate)),
    (KDA, Fault("mlp", f"{_M}.model.MlxModel", "_moe", no_shared_experts_mlx)),
    (HEAD, Fault("final_norm", _PLAIN, "attn_res_mix", second_scaled)),
]

NATIVE = [(MLA, Fault("moe.mixed", "k3mlx.experts.native", "_places", heavier))]  # of both backends
