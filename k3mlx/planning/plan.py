"""Plans of memory and speed for one model on this machine and on others, by format of the dense weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.devices import Choice
from k3mlx.errors import ResourceError
from k3mlx.governor import AUTO_SHARE, MemoryPlan, all_resident, plan_memory, smallest_memory, smallest_with
from k3mlx.needs import Needs, default_needs

from .hits import hit_rates
from .machines import SYSTEM_BYTES, Mac
from .speed import MAC, Host, Range, decode, prompt

METAL = Choice("mlx", "metal", kernels=True)
PROMPT_TOKENS = 1000
PROCESS = 100_000_000  # bytes of an engine's process before it loads anything, without its table of tensors
TENSOR = 600  # bytes of a tensor in that table
NOTHING = Range(0.0, 0.0)
ABOUT = 0.9  # of a rate is about that rate
GOOD_SETS = 2  # a cache holds what so many tokens use, before it is called recommended


@dataclass(frozen=True)
class Sizes:
    """Budgets in bytes: the smallest that works, that with all dense weights in memory, and the recommended one."""

    smallest: int
    resident: int
    recommended: int


@dataclass(frozen=True)
class Case:
    """One format on one machine. `plan` is None when it does not fit; `smallest` is what would."""

    format: str
    budget: int | None
    smallest: int
    plan: MemoryPlan | None
    slots: float = 0.0
    hits: Range = NOTHING
    tokens_per_second: Range = NOTHING
    prompt_seconds: Range = NOTHING

    def report(self) -> dict[str, Any]:
        """As plain values."""
        fields = {"format": self.format, "fits": self.plan is not None, "smallest_bytes": self.smallest}
        if self.plan is None:
            return {**fields, "budget_bytes": self.budget}
        return {
            **fields,
            "memory": self.plan.report(),
            "slots_per_layer": round(self.slots, 2),
            "hit_rate": list(self.hits),
            "tokens_per_second": list(self.tokens_per_second),
            "prompt_tokens": PROMPT_TOKENS,
            "prompt_seconds": list(self.prompt_seconds),
        }


def model_needs(choice: Choice, checkpoint: Checkpoint, context: int) -> Needs:
    """What the engine will plan with, its process included."""
    needs = default_needs(choice, checkpoint, context)
    return replace(needs, process=PROCESS + TENSOR * (len(checkpoint.tensors) + 6 * needs.experts))


def sizes(needs: Needs) -> Sizes:
    """The three budgets of a model."""

    def good(plan: MemoryPlan) -> bool:
        wanted = min(needs.experts, GOOD_SETS * needs.least * _layers(needs))
        return all_resident(plan) and plan.cache >= wanted * needs.expert

    return Sizes(smallest_memory(needs), smallest_with(needs, all_resident), smallest_with(needs, good))


def case(
    name: str, checkpoint: Checkpoint, needs: Needs, budget: int | None, rate: float, host: Host = MAC
) -> Case:
    """Plan one format for a budget (None: what this machine has). rate: bytes a second of the disk."""
    smallest = smallest_memory(needs)
    try:
        plan = plan_memory(needs, budget, None)
    except ResourceError:
        return Case(name, budget, smallest, None)
    config = checkpoint.config
    moe = len(config.moe_layers)
    slots = plan.cache / needs.expert / moe if moe else 0.0
    hits = Range(*hit_rates(slots, config.num_experts))
    streamed = plan.dense_bytes_per_pass
    return Case(
        name, budget, smallest, plan, slots, hits,
        decode(config, hits, streamed, rate, host),
        prompt(config, PROMPT_TOKENS, plan.chunk, streamed, rate, host),
    )  # fmt: skip


def mac_budget(mac: Mac) -> int:
    """Bytes that the engine gets of a Mac that runs nothing else."""
    return mac.memory if mac.exactly else min(int(AUTO_SHARE * mac.memory), mac.memory - SYSTEM_BYTES)


def best(cases: Sequence[Case]) -> Case:
    """Of those that fit the first, so with the most bits, that is about as fast as the fastest; else the smallest."""
    fitting = [case for case in cases if case.plan is not None]
    if not fitting:
        return min(cases, key=lambda case: case.smallest)
    fastest = max((case.tokens_per_second for case in fitting), key=lambda rates: (rates.high, rates.low))
    return next(
        case
        for case in fitting
        if case.tokens_per_second.low >= ABOUT * fastest.low
        and case.tokens_per_second.high >= ABOUT * fastest.high
    )


def _layers(needs: Needs) -> int:
    """Layers that the experts in memory are shared by."""
    return sum(size > 0 for size in needs.dense.layers)
