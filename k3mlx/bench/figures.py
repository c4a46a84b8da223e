"""From repeats of the whole model to figures: rates, where the time went, experts found and read.

Owns the meaning of the split. Parts are those of the engine's report, in which a layer's dense weights are waited for
in `other`: that is `dense_wait` here. Added are `outside`, what passed between two passes through the model; `hidden`,
loading of experts behind other work (it takes no time of its own); and `python`, which lies within the parts: what is
neither a product (an evaluation of MLX, a call of the C kernels, recurrence, attention and experts of numpy) nor a
wait. On numpy with dense weights of its own (small models) products cannot be told apart and there is no `python`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .result import Figure, rate
from .whole import Trial

PARTS = ("attention", "router", "mlp", "experts", "expert_wait", "head", "other")
SPLIT = (*PARTS, "dense_wait", "outside")  # they add up to the whole
BESIDE = ("hidden", "python")  # they lie within or behind these
NAMES = {
    "attention": "attention",
    "router": "router",
    "mlp": "shared and dense MLPs",
    "experts": "routed experts",
    "expert_wait": "expert loading, waited for",
    "head": "head",
    "other": "mixes, norms, the rest",
    "dense_wait": "dense loading, waited for",
    "outside": "between passes",
    "token": "whole",
    "hidden": "expert loading, hidden",
    "python": "Python, beside products",
}


def figures_of_trials(trials: Sequence[Trial], prompt_tokens: int) -> dict[str, Figure]:
    """Everything that is compared, by name; times are milliseconds a token."""
    steps = len(trials[0].step_seconds)
    figures = {"prompt_rate": rate("tokens/s", prompt_tokens, (t.prompt_seconds for t in trials))}
    figures |= _phase("prompt", prompt_tokens, [(t.prompt_seconds, t.prompt) for t in trials])
    if steps:
        figures["decode_rate"] = rate("tokens/s", steps, (t.decode_seconds for t in trials))
        figures |= _phase("decode", steps, [(t.decode_seconds, t.decode) for t in trials])
    return figures


def whole_name(phase: str) -> str:
    """The figure that `SPLIT` adds up to in every repeat: a token's whole time."""
    return f"{phase}_token"


def _phase(name: str, tokens: int, runs: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Figure]:
    """Figures of prompts or of decoding: the split, hit rate, bytes read."""
    splits = [split(seconds, report) for seconds, report in runs]
    figures = {
        f"{name}_{part}": Figure("ms/token", tuple(1e3 * one[part] / tokens for one in splits))
        for part in splits[0]
    }
    figures[whole_name(name)] = Figure("ms/token", tuple(1e3 * wall / tokens for wall, _ in runs))
    experts = [report["experts"] for _, report in runs]
    if all(one["hits"] + one["misses"] for one in experts):
        shares = tuple(one["hits"] / (one["hits"] + one["misses"]) for one in experts)
        figures[f"{name}_hit_rate"] = Figure("of experts", shares)
    read = tuple(one["bytes_read"] / tokens / 1e9 for one in experts)
    figures[f"{name}_read"] = Figure("GB/token", read)
    return figures


def split(wall: float, report: dict[str, Any]) -> dict[str, float]:
    """Seconds by part. `SPLIT` adds up to `wall`; `BESIDE` does not count in the sum."""
    parts = {part: report["seconds"][part] for part in PARTS}
    inside, dense_wait = sum(parts.values()), report["dense"]["wait_seconds"]
    parts["other"] -= dense_wait
    found = {**parts, "dense_wait": dense_wait, "outside": max(0.0, wall - inside)}
    experts = report["experts"]
    found["hidden"] = max(0.0, experts["read_seconds"] - experts["wait_seconds"])
    products = report["runtime"].get("product_seconds")
    if products is not None:
        found["python"] = inside - products - parts["expert_wait"] - dense_wait
    return found
