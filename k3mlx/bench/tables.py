"""Results as text: rates, the split, steadiness, context, kernels, comparison. Owns the wording; prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3mlx.memory import format_size

from .compare import CONFIDENCE, Ratio
from .context import context_points, line_through, spread_of
from .figures import BESIDE, NAMES, SPLIT, whole_name
from .result import Figure

PHASES = ("prompt", "decode")
SHOWN = 6  # reasons


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows as text in columns, the first `left` of them aligned to the left."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if n < left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float) -> str:
    """Three digits: `1234`, `12.3`, `0.00123`."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def with_range(figure: Figure) -> str:
    """`12.3 tokens/s (11.9 to 12.8)`."""
    return f"{number(figure.median)} {figure.unit} ({number(figure.low)} to {number(figure.high)})"


def whole(figures: Mapping[str, Figure], peak: int) -> list[str]:
    """The whole model: rates with the peak of memory in bytes, and the split."""
    return [f"{rates(figures)}\npeak memory {format_size(peak)}", split_table(figures)]


def rates(figures: Mapping[str, Figure]) -> str:
    """Prompt and decode, a line each, with experts found in memory and bytes read."""
    lines = []
    for phase in PHASES:
        if f"{phase}_rate" not in figures:
            continue
        line = f"{phase}: {with_range(figures[f'{phase}_rate'])}"
        if found := figures.get(f"{phase}_hit_rate"):
            line += f", {found.median:.1%} of experts in memory"
        lines.append(f"{line}, {number(figures[f'{phase}_read'].median)} GB/token read")
    return "\n".join(lines)


def split_table(figures: Mapping[str, Figure]) -> str:
    """Where a token's time goes, by phase: milliseconds and share; what lies within or behind the rest in brackets.

    Each row is a median over repeats, so rows add up to the whole only nearly; in every repeat they do exactly.
    """
    phases = [phase for phase in PHASES if f"{phase}_{SPLIT[0]}" in figures]
    joint = all(figures[f"{phase}_router"].high == 0 for phase in phases)  # on MLX: one evaluation
    names = {**NAMES, "attention": "attention with router"} if joint else NAMES
    header = ["ms a token", *(cell for phase in phases for cell in (phase, "share"))]
    whole = {phase: figures[whole_name(phase)].median for phase in phases}
    rows = [header]
    for part in (*SPLIT, "token", *BESIDE):
        if f"{phases[0]}_{part}" not in figures or (joint and part == "router"):
            continue
        if part == "dense_wait" and not any(figures[f"{phase}_{part}"].high for phase in phases):
            continue
        row = [f"({names[part]})" if part in BESIDE else names[part]]
        for phase in phases:
            value = figures[f"{phase}_{part}"].median
            row += [number(value), f"{value / whole[phase]:.1%}" if whole[phase] else ""]
        rows.append(row)
    return columns(rows)


def steadiness(verdict: Mapping[str, Any]) -> str:
    """One line for steady figures; the reasons and the criterion for others."""
    others = verdict["others"]
    load = "not known here" if others is None else f"{others:.1%} of the processors"
    if verdict["steady"]:
        return f"steady (other processes: {load}); that is: {verdict['criterion']}"
    reasons = verdict["reasons"]
    more = [f"and {len(reasons) - SHOWN} more"] if len(reasons) > SHOWN else []
    lines = [*reasons[:SHOWN], *more, f"steady is: {verdict['criterion']}"]
    return "\n  ".join(["NOT STEADY: do not quote these figures", *lines])


def context_table(figures: Mapping[str, Figure], sizes: Sequence[Mapping[str, int]]) -> str:
    """Attention of a layer by context; below the measured lengths sizes only. Then how flat, and the line."""
    points = {kind: dict(context_points(dict(figures), kind)) for kind in ("kda", "mla")}
    rows = [["context", "KDA ms/layer", "MLA ms/layer", "KDA state/layer", "MLA cache/layer"]]
    for size in sizes:
        tokens = size["tokens"]
        times = [number(points[kind][tokens]) if tokens in points[kind] else "" for kind in ("kda", "mla")]
        rows.append([str(tokens), *times, format_size(size["kda"]), format_size(size["mla"])])
    lines = [columns(rows, left=0)]
    kda, mla = (sorted(points[kind].items()) for kind in ("kda", "mla"))
    if len(kda) > 1:
        lines.append(f"KDA: all lengths within {spread_of(kda):.1%}")
    if len(mla) > 2:
        line = line_through(mla)
        lines.append(
            f"MLA: {number(line.start)} ms + {number(1000 * line.slope)} ms for each 1,000 tokens (R² {line.fit:.4f})"
        )
    return "\n".join(lines)


def kernels_table(rate: float, points: Sequence[Mapping[str, Any]]) -> str:
    """A row a kernel: time of a launch, bytes moved a second, its part of the rate of a copy."""
    rows = [["kernel", "path", "ms", "GB/s", "of copy", "GFLOP/s"]]
    for point in points:
        moved, work = point["bytes"] / point["ms"] / 1e6, point["operations"] / point["ms"] / 1e6
        rows.append(
            [point["name"], point["path"], number(point["ms"]), number(moved), f"{point['of_memory_rate']:.1%}",
             number(work)]
        )  # fmt: skip
    return f"copy: {rate / 1e9:.1f} GB/s, both ways counted\n{columns(rows, left=2)}"


def streaming_table(found: Mapping[str, Any]) -> str:
    """What was measured of streaming, a line a part."""
    lines = []
    if rate := found.get("rate"):
        lines.append(
            f"store {rate['store_bytes_per_second'] / 1e9:.2f} GB/s, plain parallel reads"
            f" {rate['probe_bytes_per_second'] / 1e9:.2f} GB/s: {rate['ratio']:.3f} of them"
        )
    if step := found.get("decode"):
        lines.append(
            f"a step that reads every expert {1e3 * step['step']:.0f} ms, of dense + max(read, compute)"
            f" {1e3 * step['predicted']:.0f} ms: {step['ratio']:.3f}; lookahead gains {step['lookahead_gain']:.1%}"
        )
    if dense := found.get("dense"):
        lines.append(
            f"a step that reads {dense['streamed_layers']} layers {dense['step_seconds']:.2f} s, at"
            f" {dense['ratio']:.3f} of the {dense['probe_bytes_per_second'] / 1e9:.2f} GB/s of plain parallel reads"
        )
    for prompt in found.get("prompt", ()):
        lines.append(
            f"prompt of {prompt['tokens']} in passes of {prompt['chunk']}: {prompt['seconds']:.2f} s,"
            f" {format_size(prompt['bytes_read'])} read, {prompt['wait_seconds']:.2f} s waited"
        )
    return "\n".join(lines)


def _ratio(value: float) -> str:
    """`1.234`; where few processes vary much, an end of the range is large: `3e+69`."""
    return f"{value:.3f}" if value < 1000 else f"{value:.0e}"


def comparison(ratios: Sequence[Ratio], remarks: Sequence[str]) -> str:
    """A row a figure: this, the other, their ratio and its range; what the range is; then `remarks`."""
    rows = [["this / other", "this", "other", "ratio", "from", "to", ""]]
    for one in ratios:
        rows.append(
            [f"{one.name}, {one.unit}", number(one.this), number(one.other),
             *(_ratio(value) for value in (one.ratio, one.low, one.high)), one.verdict]
        )  # fmt: skip
    lines = [columns(rows)]
    if any(one.known for one in ratios):
        lines.append(
            f"from, to: {CONFIDENCE:.0%} range by how the medians of processes vary (Student's t of their logarithms);"
            " this, other: means of these medians; a range around 1 is no difference"
        )
    if not all(one.known for one in ratios):
        lines.append(
            "one process each: how much processes vary is not known, so nothing is called a difference; from, to:"
            " worst repeat of one over best of the other"
        )
    return "\n".join([*lines, *remarks])
