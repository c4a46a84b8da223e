"""Results as pictures with matplotlib (extra `report`): a panel for each thing that was measured.

Owns what is drawn. Raises ResourceError without matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from k3mlx.errors import K3Error, ResourceError

from .context import context_points
from .figures import NAMES, SPLIT, whole_name
from .result import Figure

Panel = Callable[[Any], None]  # draws on axes


def picture(result: Mapping[str, Any], figures: Mapping[str, Figure]) -> bytes:
    """PNG of every panel that the result has data for."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise ResourceError(f"plots need matplotlib ({error}): pip install 'k3mlx[report]'") from None
    panels = _panels(result, figures)
    if not panels:
        raise K3Error("nothing that was measured can be drawn; run bench without --streaming for plots")
    rows = -(-len(panels) // 2)
    canvas = Canvas(figsize=(12, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(canvas)
    for axes, draw in zip(canvas.subplots(rows, 2, squeeze=False).flat, panels, strict=False):
        draw(axes)
    for axes in list(canvas.axes)[len(panels) :]:
        axes.set_axis_off()
    canvas.suptitle(title(result))
    out = io.BytesIO()
    canvas.savefig(out, format="png", dpi=110)
    return out.getvalue()


def write_picture(path: str, result: Mapping[str, Any], figures: Mapping[str, Figure]) -> None:
    """The picture as a file. Raises K3Error when it cannot be written."""
    data = picture(result, figures)
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise K3Error(f"--report {path}: cannot be written ({error.strerror})") from None


def title(result: Mapping[str, Any]) -> str:
    """Model, backend and machine in a line; a warning where figures are not steady."""
    machine, model, runs = result["machine"], result.get("model"), result.get("runs_on")
    parts = [f"{model['name']}, {model['layers']} layers"] if model else []
    parts += [f"{runs['backend']} {runs['dtype']} on {runs['device']}"] if runs else []
    parts.append(str(machine["gpu"] or machine["chip"]))
    steady = result.get("steady")
    return " · ".join(parts) + ("" if steady is None or steady["steady"] else " · NOT STEADY")


def _panels(result: Mapping[str, Any], figures: Mapping[str, Figure]) -> list[Panel]:
    panels: list[Panel] = []
    trials = result.get("trials")
    if trials and trials[0]["step_seconds"]:
        panels.append(lambda axes: _steps(axes, trials, result["options"]["prompt_tokens"]))
    if trials:
        panels.append(lambda axes: _split(axes, figures))
        if any(sum(trial["step_hits"]) + sum(trial["step_misses"]) for trial in trials):
            panels.append(lambda axes: _hit_rate(axes, trials))
    if context_points(dict(figures), "kda") or context_points(dict(figures), "mla"):
        panels.append(lambda axes: _context(axes, figures))
    if result.get("kernels"):
        panels.append(lambda axes: _roofline(axes, result["kernels"]["copy_bytes_per_second"], _gpu(result)))
    if result.get("cpu"):
        panels.append(lambda axes: _roofline(axes, *_cpu(result["cpu"])))
    return panels


def _steps(axes: Any, trials: list[dict[str, Any]], start: int) -> None:
    """Milliseconds of each decode step against the context it had."""
    columns = list(zip(*(trial["step_seconds"] for trial in trials), strict=True))
    x = range(start, start + len(columns))
    axes.fill_between(x, [1e3 * min(c) for c in columns], [1e3 * max(c) for c in columns], alpha=0.25)
    axes.plot(x, [1e3 * median(c) for c in columns])
    axes.set(title="Time a token", xlabel="context, tokens", ylabel="ms (median, range)", ylim=(0, None))


def _split(axes: Any, figures: Mapping[str, Figure]) -> None:
    """Where the time goes, in parts of a token."""
    phases = [phase for phase in ("prompt", "decode") if f"{phase}_{SPLIT[0]}" in figures]
    left = [0.0] * len(phases)
    whole = [figures[whole_name(phase)].median or 1.0 for phase in phases]
    for part in SPLIT:
        shares = [figures[f"{phase}_{part}"].median / all_ for phase, all_ in zip(phases, whole, strict=True)]
        axes.barh(phases, shares, left=left, label=NAMES[part])
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set(title="Where the time goes", xlabel="share of a token", xlim=(0, 1))
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def _hit_rate(axes: Any, trials: list[dict[str, Any]]) -> None:
    """Experts found in memory, decode step by decode step through all repeats."""
    hits = [n for trial in trials for n in trial["step_hits"]]
    misses = [n for trial in trials for n in trial["step_misses"]]
    axes.plot([h / (h + m) if h + m else 1.0 for h, m in zip(hits, misses, strict=True)])
    axes.set(title="Experts in memory", xlabel="decode step", ylabel="hit rate", ylim=(0, 1.02))


def _context(axes: Any, figures: Mapping[str, Figure]) -> None:
    """Attention of a layer against context."""
    for kind in ("kda", "mla"):
        points = context_points(dict(figures), kind)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=kind.upper())
    axes.set(title="Attention of a layer", xlabel="context, tokens", ylabel="ms", ylim=(0, None))
    axes.legend()


Spot = tuple[str, float, float]  # name, operations a byte, GFLOP/s


def _gpu(result: Mapping[str, Any]) -> list[Spot]:
    return [
        (p["name"], p["operations"] / p["bytes"], p["operations"] / p["ms"] / 1e6)
        for p in result["kernels"]["points"]
    ]


def _cpu(cpu: Mapping[str, Any]) -> tuple[float, list[Spot]]:
    read, *rows = cpu["rows"]
    spots = [
        (
            f"{row['op']} T{row['tokens']}",
            2 * row["multiply_adds"] / row["bytes"],
            2 * row["multiply_adds"] / row["seconds"] / 1e9,
        )
        for row in rows
    ]
    return read["bytes"] / read["seconds"], spots


def _roofline(axes: Any, rate: float, spots: list[Spot]) -> None:
    """Operations a second over operations a byte; the line is what the measured memory rate allows."""
    ends = [min(x for _, x, _ in spots) / 2, max(x for _, x, _ in spots) * 2]
    axes.loglog(ends, [rate * x / 1e9 for x in ends], color="black", label=f"memory, {rate / 1e9:.1f} GB/s")
    for name, x, y in spots:
        axes.loglog(x, y, "o")
        axes.annotate(name, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.set(title="Roofline", xlabel="operations a byte", ylabel="GFLOP/s")
    axes.legend()
