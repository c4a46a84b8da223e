"""The report as a picture with matplotlib (extra `report`): errors by depth.

Owns what is drawn. Raises ResourceError without matplotlib.
"""

from __future__ import annotations

import io
from typing import Any

from k3mlx.errors import ResourceError

from .run import LayerReport, Report

COLOURS = {"kda": "tab:blue", "mla": "tab:orange", "embedding": "tab:green", "head": "tab:green"}
ZERO = 1e-17  # where an error of nothing at all is drawn on the logarithmic axis


def picture(report: Report) -> bytes:
    """PNG: the worst stage of each layer beside its tolerance, and the drift of the tried path's own stream."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ResourceError(f"plots need matplotlib ({error}): pip install 'k3mlx[report]'") from None
    canvas = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots()
    _draw(axes, report.layers)
    axes.set_title(f"{report.got} against {report.expected}, {report.tokens} tokens")
    out = io.BytesIO()
    canvas.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _draw(axes: Any, layers: list[LayerReport]) -> None:
    found = [(place, layer, layer.worst) for place, layer in enumerate(layers) if layer.worst is not None]
    for kind in dict.fromkeys(layer.kind for _, layer, _ in found):
        points = [(place, max(worst.error, ZERO)) for place, layer, worst in found if layer.kind == kind]
        axes.plot(*zip(*points, strict=True), "o", color=COLOURS[kind], label=f"worst stage, {kind}")
    wrong = [(place, worst) for place, _, worst in found if not worst.ok]
    for place, worst in wrong:
        axes.plot(place, max(worst.error, ZERO), "x", color="red", markersize=11)
    for place, worst in wrong[:5]:
        axes.annotate(worst.stage, (place, worst.error), xytext=(6, 6), textcoords="offset points")
    axes.plot(
        [p for p, _, _ in found], [w.tolerance for _, _, w in found], "--", color="grey", label="tolerance"
    )
    drift = [(place, layer.drift) for place, layer in enumerate(layers) if layer.drift is not None]
    if drift:
        axes.plot(*zip(*drift, strict=True), "-", color="black", label="drift of its own stream")
    names = [layer.kind if layer.layer is None else str(layer.layer) for layer in layers]
    step = max(1, len(names) // 24)
    axes.set_xticks(range(0, len(names), step), names[::step])
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error")
    axes.legend()
