"""Memory: will the model fit, what would make it fit, and may the GPU wire its weights.

Owns the findings. The plan is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator

from k3mlx.devices import Choice
from k3mlx.errors import ResourceError
from k3mlx.governor import MemoryPlan, all_resident, plan_memory, smallest_memory, smallest_with
from k3mlx.memory import format_size
from k3mlx.needs import Needs

from .findings import Finding, fatal, ok, warning

SYSTEM_SHARE = 8 << 30  # bytes of a Mac's memory that are left to the system when the wired limit is raised


def check_experts_format(choice: Choice, affine: bool) -> Iterator[Finding]:
    """Experts as affine codes are computed by mlx only."""
    if affine and choice.backend == "numpy":
        yield fatal(
            "experts-format", "the experts are stored as affine codes, which the numpy backend does not compute",
            "use --backend mlx",
        )  # fmt: skip


def check_memory(
    needs: Needs, memory: int | None, expert_cache: int | None
) -> tuple[MemoryPlan | None, Finding]:
    """The plan of a run with `memory` bytes (None: what there is), and the finding about it."""
    smallest, whole = smallest_memory(needs, None, expert_cache), smallest_with(needs, all_resident)
    figures = {"smallest": smallest, "resident": whole, "weights": needs.dense.total}
    try:
        plan = plan_memory(needs, memory, expert_cache)
    except ResourceError as error:
        remedy = f"close programs, or a machine that can give {format_size(smallest)}; " + _larger(
            needs, whole
        )
        return None, fatal("memory", f"will not fit: {error}", remedy, data=figures)
    experts = plan.cache // needs.expert if needs.expert else 0
    text = f"{plan.lines()[0]}; {experts} of {needs.experts} experts in memory"
    figures |= plan.report()
    if plan.dense_bytes_per_pass:
        text = f"it fits, but {plan.lines()[1]}; {text}"
        return plan, warning("memory", text, _larger(needs, whole), data=figures)
    return plan, ok("memory", f"it fits: {text}", data=figures)


def check_wired(plan: MemoryPlan, limit: int | None, total: int | None) -> Iterator[Finding]:
    """Whether the GPU may wire the weights. limit: bytes that it may wire, total: of the machine; None: not known."""
    if limit is None or plan.weights <= limit:
        return
    text = f"the GPU may wire {format_size(limit)}, less than the weights in memory ({format_size(plan.weights)})"
    wanted = -(-plan.weights // (1 << 20)) + 1024
    if total is None or (wanted << 20) + SYSTEM_SHARE <= total:
        remedy = f"sudo sysctl iogpu.wired_limit_mb={wanted} (until the next restart)"
    else:
        remedy = "weights of fewer bits: k3mlx convert; without it they may be paged out"
    yield warning("wired", text, remedy)


def _larger(needs: Needs, whole: int) -> str:
    weights = format_size(needs.dense.total)
    return f"{format_size(whole)} hold all dense weights ({weights}); k3mlx convert stores them in fewer bits"
