"""What the server has done, in Prometheus' text format. Owns names and help texts; counts nothing itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import Worker

Sample = tuple[str, str, str, float]  # name, kind, help, value


def text(worker: Worker) -> str:
    """All samples, each with its help and kind."""
    lines: list[str] = []
    for name, kind, help, value in _samples(worker):
        family = name.partition("{")[0]
        if not any(line.startswith(f"# TYPE {family} ") for line in lines):
            lines += [f"# HELP {family} {help}", f"# TYPE {family} {kind}"]
        lines.append(f"{name} {value:.17g}")
    return "\n".join(lines) + "\n"


def _samples(worker: Worker) -> Iterable[Sample]:
    totals, report = worker.totals, worker.report
    yield "k3mlx_ready", "gauge", "1 when the model is loaded.", worker.state == "ready"
    yield "k3mlx_requests_waiting", "gauge", "Requests in line.", worker.queue_length
    yield "k3mlx_requests_running", "gauge", "Requests being answered.", worker.running is not None
    for result in ("answers", "cancelled", "failed"):
        name = f'k3mlx_requests_total{{result="{result}"}}'
        yield name, "counter", "Requests that reached the model, by result.", getattr(totals, result)
    yield "k3mlx_prompt_tokens_total", "counter", "Ids of prompts.", totals.prompt_tokens
    yield "k3mlx_cached_tokens_total", "counter", "Those not read again.", totals.cached_tokens
    memory, disk = worker.kept_bytes
    yield 'k3mlx_kept_bytes{place="memory"}', "gauge", "State of kept sessions.", memory
    yield 'k3mlx_kept_bytes{place="disk"}', "gauge", "State of kept sessions.", disk
    if report:
        yield "k3mlx_read_tokens_total", "counter", "Prompt ids the model read.", report["prompt_tokens"]
        generated = report["generated_tokens"]
        yield "k3mlx_generated_tokens_total", "counter", "Ids the model wrote.", generated
        for part, seconds in report["seconds"].items():
            yield f'k3mlx_seconds_total{{part="{part}"}}', "counter", "Time, by part of the work.", seconds
        experts = report["experts"]
        for name in ("hits", "misses", "evictions"):
            yield f"k3mlx_expert_{name}_total", "counter", f"Expert cache {name}.", experts[name]
        read = experts["bytes_read"]
        yield "k3mlx_expert_bytes_read_total", "counter", "Bytes of experts read from disk.", read
        peak = report["peak_memory_bytes"]
        yield "k3mlx_peak_memory_bytes", "gauge", "Largest resident size of this process.", peak
    resident = resident_bytes()
    if resident is not None:
        yield "process_resident_memory_bytes", "gauge", "Resident size of this process.", resident


def resident_bytes() -> int | None:
    """Resident size of this process now, where the system tells without a helper (Linux)."""
    if sys.platform != "linux":
        return None
    pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
