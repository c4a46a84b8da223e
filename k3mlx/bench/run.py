"""One run of the benchmark: the parts that were asked for, gathered into a result and its tables.

Owns the gathering, in the order of the calls. What is measured and how it reads is in the other files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from k3mlx.engine import Engine

from . import context, facts, tables
from .figures import figures_of_trials
from .result import FORM, Figure, figures_as_dict
from .steady import Neighbours, judge
from .whole import Ids, Trial, run_trials


class Run:
    """Gathers parts. `figures` are what is compared, `sections` the tables, `repeats` what steadiness is judged by."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.figures: dict[str, Figure] = {}
        self.sections: list[str] = []
        self.repeats: dict[str, Sequence[float]] = {}
        self._device = "cpu"
        self._found: dict[str, Any] = {"options": dict(options), "versions": facts.versions()}
        self._neighbours = Neighbours()

    def engine(self, engine: Engine) -> None:
        """What the next parts run on."""
        self._device = engine.backend.device
        self._found |= {"model": facts.model_facts(engine), "runs_on": facts.runs_on(engine)}

    def whole(
        self, engine: Engine, ids: Ids, prompt: int, trials: int, tell: Callable[[Trial], None]
    ) -> None:
        """Prompt and decode. The neighbours are looked at from here on."""
        self._neighbours = Neighbours()
        done = run_trials(engine, ids, prompt, trials, tell)
        self.figures |= figures_of_trials(done, prompt)
        self.repeats["prompt"] = [trial.prompt_seconds for trial in done]
        if done[0].step_seconds:
            self.repeats["decode"] = [trial.decode_seconds for trial in done]
        peak = engine.report()["peak_memory_bytes"]
        self._found |= {"trials": [_as_dict(trial) for trial in done], "peak_memory_bytes": peak}
        self.sections += tables.whole(self.figures, peak)

    def context(self, engine: Engine, lengths: Sequence[int], repeats: int) -> None:
        """Attention by context length, and the sizes of states beyond."""
        self._neighbours = Neighbours()
        found = context.measure_context(engine, lengths, repeats)
        self.figures |= found
        self.repeats |= {name: figure.values for name, figure in found.items()}
        item = {"bfloat16": 2, "float32": 4, "float64": 8}[engine.backend.dtype]
        beyond = context.lengths_beyond(lengths)
        sizes = context.state_sizes(engine.config, beyond, item, 8 if item == 8 else 4)
        self._found["context"] = {"sizes": sizes}
        self.sections.append(tables.context_table(self.figures, sizes))

    def kernels(self, device: str, repeats: int) -> None:
        """The GPU kernels, or what stands behind them on the CPU."""
        from .kernels import measure_kernels

        rate, points, lines = measure_kernels(device, repeats)
        self._device = "cpu" if device == "mlx-cpu" else device
        found = {f"kernel {point.name} ({point.path})": point.figure for point in points}
        self.figures |= found
        self.repeats |= {name: figure.values for name, figure in found.items()}
        rows = [point.as_dict(rate) for point in points]
        self._found["kernels"] = {
            "device": device,
            "copy_bytes_per_second": rate,
            "points": rows,
            "notes": lines,
        }
        self.sections.append("\n".join([tables.kernels_table(rate, rows), *lines]))

    def cpu(self, threads: int | None, rounds: int) -> None:
        """The CPU kernels in C. Their rows are medians, without a spread."""
        from k3mlx.bench_cpu import measure, table
        from k3mlx.kernels.cpu import load_cpu_kernels

        kernels = load_cpu_kernels(threads=threads)
        rows = measure(kernels, rounds)
        self.figures |= {f"cpu {r.op} T{r.tokens}": Figure("ms", (1e3 * r.seconds,)) for r in rows}
        self._found["cpu"] = {"kernels": kernels.describe(), "rows": [asdict(row) for row in rows]}
        self.sections.append(table(rows, kernels))

    def streaming(
        self, model: str | None, options: Mapping[str, Any], parts: Collection[str], repeats: int, prompt: int
    ) -> None:
        """Reading experts, beside plain reads."""
        from .streaming import measure_streaming

        found = measure_streaming(model, options, parts, repeats, prompt)
        for part in ("rate", "decode", "dense"):
            if part in found:
                values = tuple(found[part]["ratios"])
                self.figures[f"streaming {part}"] = Figure("of what is possible", values)
        self._found["streaming"] = found
        self.sections.append(tables.streaming_table(found))

    def result(self) -> dict[str, Any]:
        """The object of --json, with the verdict on steadiness, which becomes the last section."""
        verdict = judge(self.repeats, self._neighbours.share()).as_dict()
        self.sections.append(tables.steadiness(verdict))
        return {
            "k3mlx_bench": FORM,
            "machine": facts.machine_facts(self._device),
            **self._found,
            "figures": figures_as_dict(self.figures),
            "steady": verdict,
        }


def _as_dict(trial: Trial) -> dict[str, Any]:
    """What plots need of a repeat; its reports have become figures."""
    return {
        "prompt_seconds": trial.prompt_seconds,
        "step_seconds": list(trial.step_seconds),
        "step_hits": list(trial.step_hits),
        "step_misses": list(trial.step_misses),
    }
