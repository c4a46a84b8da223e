"""From repeats of the whole model to figures: rates, where the time went, experts found and read.

Owns the meaning of the split. Parts are those of the engine's report; what is added here: `hidden`, loading of
experts behind other work (it takes no time of its own), `python`, host work outside evaluations (MLX only, where it
can be told), and `outside`, what passed between two passes through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .result import Figure, rate
from .whole import Trial

PARTS = ("attention", "router", "mlp", "experts", "expert_wait", "head", "other")
SPLIT = (*PARTS, "outside")  # they add up to the whole
BESIDE = ("hidden", "python")  # they lie within or behind these
NAMES = {
    "attention": "attention",
    "router": "router",
    "mlp": "shared and dense MLPs",
    "experts": "routed experts",
    "expert_wait": "expert loading, waited for",
    "head": "head",
    "other": "mixes, norms, the rest",
    "outside": "between passes",
    "hidden": "expert loading, hidden",
    "python": "host work beside MLX",
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


def _phase(name: str, tokens: int, runs: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Figure]:
    """Figures of prompts or of decoding: the split, hit rate, bytes read."""
    splits = [split(seconds, report) for seconds, report in runs]
    figures = {
        f"{name}_{part}": Figure("ms/token", tuple(1e3 * one[part] / tokens for one in splits))
        for part in splits[0]
    }
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
    inside = sum(parts.values())
    found = {**parts, "outside": max(0.0, wall - inside)}
    experts = report["experts"]
    found["hidden"] = max(0.0, experts["read_seconds"] - experts["wait_seconds"])
    evaluated = report["runtime"].get("evaluation_seconds")
    if evaluated is not None:
        found["python"] = max(0.0, inside - evaluated - parts["expert_wait"])
    return found
