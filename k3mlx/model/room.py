"""Where a forward pass runs: device and streams, kernels, experts, deadlines, and what happens when one fails.

Owns the switches of one run and their counters. A failure ends the step; `recover` waits until every stream
is clean, switches off the path that failed and says so, and the step is built again from the state before it.
Facts on failures: an array of a failed evaluation counts as evaluated and may hold anything, so none is kept.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx

from k3mlx.errors import K3Error
from k3mlx.kernels import Kernels
from k3mlx.kernels.cpu import CpuKernels
from k3mlx.ranks.lead import Alone
from k3mlx.watchdog import Watchdog

from .moe import ExpertStreams

log = logging.getLogger("k3mlx")

STEMS = {"kda": ("kda_step", "kda_prefill"), "attn_res_mix": ("attn_res_mix",), "router": ("route_topk",)}
_EXECUTION = re.compile(
    r"Command buffer execution|CUDA error|cuda[A-Z]\w+\(|illegal memory|launch failure", re.I
)
_SYNC_TRIES = 20
DEADLINE_SECONDS = 120.0  # for an evaluation of any size
PRODUCTS_PER_SECOND = {"cpu": 1e8, "metal": 1e10, "cuda": 1e10}  # far below what any of them does


class EndOfRun(K3Error):
    """A failure after which this process cannot go on computing; the ids fed so far are worth saving."""


class Room:
    """The paths of one engine: used and changed by the thread that owns MLX only.

    kind: `metal`, `cuda` or `cpu`, where the dense parts run. experts: the streams for routed experts, which
    run on the CPU unless `experts_kind` says otherwise; None if the host computes them, by what `host` names.
    cpu_streams: how many streams of the CPU to use if they fall back to it; 0 for the host instead.
    ranks: the processes that have a part of the routed experts; this one alone if None.
    """

    def __init__(
        self,
        kind: str,
        kernels: Kernels,
        experts: ExpertStreams | None,
        experts_kind: str,
        watchdog: Watchdog,
        cpu_streams: int = 1,
        ranks: Alone | None = None,
        host: str = "numpy",
    ) -> None:
        self.kind = kind
        self.ranks = ranks or Alone()
        self.kernels = kernels
        self.experts = experts
        self.host = host
        self.experts_kind = experts_kind
        self.watchdog = watchdog
        # a kernel runs on its thread's default stream whatever the context says, so everything else does too
        self.stream = mx.default_stream(mx.cpu if kind == "cpu" else mx.gpu)
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.first_kind = kind
        self.evaluations = 0  # that have been waited for
        self.evaluation_seconds = 0.0  # in which the host waited for MLX
        self._first_experts = (experts is None, experts_kind)
        self._cpu_streams = cpu_streams
        self._part = "head"
        self._evaluating = False
        self._launched: dict[str, int] = {}
        self._streams = [self.stream, *([] if experts is None else experts.streams)]

    def begin(self) -> None:
        """A step starts: nothing of it has been launched."""
        self._evaluating = False
        self._launched = self._launches()

    def enter(self, part: str) -> None:
        """The operations built from now on belong to `part`."""
        self._part = part
        self.calls[part] += 1
        if part == "experts":
            self.fallbacks[part] += (self.experts is None, self.experts_kind) != self._first_experts
        else:
            self.fallbacks[part] += self.kind != self.first_kind

    def evaluate(self, what: str, arrays: Sequence[Any], seconds: float) -> None:
        """Wait for `arrays`; after `seconds` the watchdog ends the process, naming `what`."""
        self._evaluating, started = True, perf_counter()
        kernels = ", ".join(self._suspects())
        with self.watchdog.watch(f"{what}{f' (kernels {kernels})' if kernels else ''}", seconds):
            mx.eval(arrays)
        self._evaluating = False
        self.evaluations += 1
        self.evaluation_seconds += perf_counter() - started
        self._launched = self._launches()

    def deadline(self, products: int) -> float:
        """Seconds that an evaluation of so many products may take at the very most."""
        return DEADLINE_SECONDS + products / PRODUCTS_PER_SECOND[self.kind]

    def recover(self, error: str) -> None:
        """After a failed step whose arrays have been dropped: leave only paths that may work.

        Raises EndOfRun after an execution fault on CUDA, K3Error when there is no path left.
        """
        for stream in self._streams:
            self._settle(stream)
        short = " ".join(error.split())[:200]
        executing = bool(_EXECUTION.search(error))
        suspects = self._suspects(error)
        what = ", ".join(suspects) or f"a step, at {self._part},"
        where = f"{what} failed on {self.kind}"
        if executing and self.kind == "cuda":
            raise EndOfRun(f"{where} and CUDA cannot go on after that: {short}")
        if suspects and not (executing and self.kind == "metal"):
            for stem in suspects:
                self.kernels.disable(stem, short, failed=stem == suspects[0])
            remedy = "plain operations instead"
        elif (
            self._part == "experts" and self.experts is not None and not (executing and self.kind == "metal")
        ):
            self._count_failure()
            remedy = self._experts_fall_back()
        elif self.kind != "cpu":
            self._count_failure()
            self.to_cpu(short)
            remedy = "everything on the CPU from now on"
        else:
            raise K3Error(f"{where} and nothing is left to fall back on: {short}")
        log.warning("k3mlx: %s (%s); the step is done again with %s", where, short, remedy)

    def _experts_fall_back(self) -> str:
        """From a GPU to the streams of the CPU, from there to the host."""
        if self.experts is None or self.experts_kind == "cpu" or not self._cpu_streams:
            self.experts, self.experts_kind = None, "cpu"
            return f"routed experts by {self.host} from now on"
        self.experts = ExpertStreams(mx.cpu, self._cpu_streams, self.experts.group)
        self.experts_kind = "cpu"
        self._streams += self.experts.streams
        return "routed experts on the CPU from now on"

    def to_cpu(self, reason: str) -> None:
        """Run everything on the CPU device from now on."""
        self.kind = "cpu"
        self.stream = mx.default_stream(mx.cpu)
        self._streams.append(self.stream)
        self.kernels.disable_all(reason)
        if self.experts_kind != "cpu":
            self._experts_fall_back()

    def report(self, formats: dict[str, str]) -> list[dict[str, Any]]:
        """One row a part, in the form of the engine's report; `formats` are the weight formats."""
        return [
            {
                "part": part,
                "device": self._device(part),
                "kernel": self._kernel(part),
                "format": formats[part],
                "calls": self.calls[part],
                "failures": self.failures[part] + sum(c.failures for c in self._counters(part)),
                "fallbacks": self.fallbacks[part]
                + (sum(c.fallbacks for c in self._counters(part)) if self._counts_kernels() else 0),
            }
            for part in formats
        ]

    def _counts_kernels(self) -> bool:
        return self.kernels.maker is not None and self.kind == self.first_kind

    def _counters(self, part: str) -> list[Any]:
        return [self.kernels.counters[stem] for stem in STEMS.get(part, ())]

    def _device(self, part: str) -> str:
        if part == "experts":
            return self.experts_kind
        return self.kind

    def _kernel(self, part: str) -> str:
        if part == "experts":
            if self.experts is None:
                return self.host
            count = len(self.experts.streams)
            return "mlx" if self.experts_kind != "cpu" else f"mlx on {count} stream{'s' if count > 1 else ''}"
        if self.kernels.maker is None:
            return "mlx"
        names = ["mlx" if stem in self.kernels.disabled else stem for stem in STEMS.get(part, ())]
        return ", ".join(dict.fromkeys(names)) or "mlx"

    def _launches(self) -> dict[str, int]:
        return {stem: counter.calls for stem, counter in self.kernels.counters.items()}

    def _suspects(self, error: str = "") -> list[str]:
        """Kernels that the failed work may owe its failure to: the one named, else the part being built, else
        whatever was launched since the last evaluation that succeeded."""
        active = [stem for stem in self.kernels.counters if stem not in self.kernels.disabled]
        if self.kernels.maker is None:
            return []
        named = [stem for stem in active if f"custom_kernel_{stem}" in error]
        if named:
            return named
        if not self._evaluating and self._part in STEMS:
            mine = [stem for stem in STEMS[self._part] if stem in active]
            launched = [stem for stem in mine if self.kernels.counters[stem].calls > self._launched[stem]]
            return launched or mine
        return [stem for stem in active if self.kernels.counters[stem].calls > self._launched[stem]]

    def _count_failure(self) -> None:
        self.failures[self._part] += 1

    def _settle(self, stream: Any) -> None:
        """Wait for a stream until it raises nothing more: an error may surface again in innocent work."""
        for _ in range(_SYNC_TRIES):
            try:
                with self.watchdog.watch("waiting for a stream after a failure", 60):
                    mx.synchronize(stream)
            except Exception:
                continue
            return
        raise EndOfRun("a stream keeps failing after an error; the process cannot go on computing")


def make_room(
    device: str,
    kernels: Kernels,
    watchdog: Watchdog,
    experts_device: str,
    native: CpuKernels | None,
    threads: int,
    ranks: Alone | None = None,
) -> Room:
    """The room of an engine, or of a rank's experts: these on streams of the GPU or the CPU, or on the host by the
    C kernels `native`. Called by the thread that owns MLX."""
    group, kind, streams = max(16, threads), "cpu", None
    if experts_device == "gpu" and device != "cpu":
        kind, streams = device, ExpertStreams(mx.gpu, 1, group)
    elif native is None:
        streams = ExpertStreams(mx.cpu, threads, group)
    host = "numpy" if native is None else native.describe()
    return Room(device, kernels, streams, kind, watchdog, 0 if native else threads, ranks, host)
