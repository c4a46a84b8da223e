"""Expert streaming on a model whose experts exceed the cache: `k3mlx bench --streaming`.

Compares the store's read rate with plain parallel reads of the same files, a decode step with what disk and
arithmetic would take, and prompts of different chunks. Says what it measured and nothing else.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.engine import Engine, Session, load
from k3mlx.experts.files import ExpertFiles
from k3mlx.experts.policies import Key
from k3mlx.experts.probe import read_rate
from k3mlx.experts.slots import NumpySlots
from k3mlx.experts.store import ExpertStore
from k3mlx.experts.trace import read_trace
from k3mlx.memory import format_size

from .dense import compare_dense

REPEATS = 5
STEPS = 4  # decode steps of a repeat
PROBED = 48  # experts of one measured rate
SMALL_CHUNK = 32  # prompt tokens


def measure_streaming(
    model: str | None, options: Mapping[str, Any], parts: Collection[str], repeats: int, prompt_tokens: int
) -> dict[str, Any]:
    """The parts `rate` (`compare_rates`), `decode` (`compare_decode`), `dense` (`compare_dense`) and `prompt`
    (`measure_prompt`, whole and in chunks of SMALL_CHUNK) of a model; options are those of `load`."""
    options = {**options, "warm_start": "off"}
    result: dict[str, Any] = {}
    if {"rate", "decode"}.intersection(parts):
        with load(model, **{**options, "prefill_step_size": 64}) as engine:
            if "rate" in parts:
                result["rate"] = compare_rates(engine.backend.store, repeats)
            if "decode" in parts:
                result["decode"] = compare_decode(engine, repeats)
    if "dense" in parts:
        with load(model, **options) as engine, open_checkpoint(engine.folder) as checkpoint:
            result["dense"] = compare_dense(engine, checkpoint, repeats)
    if "prompt" in parts:
        chunks = sorted({prompt_tokens, SMALL_CHUNK}, reverse=True)
        result["prompt"] = [measure_prompt(model, options, prompt_tokens, chunk) for chunk in chunks]
    return result


def compare_rates(store: ExpertStore, repeats: int = REPEATS) -> dict[str, Any]:
    """The store's rate with an empty cache and no arithmetic, and that of plain reads, turn and turn about.

    Each reads experts of its own, as what lies under the disk may keep what it has just read. `ratio` is the
    median over repeats of store rate / probe rate measured next to each other.
    """
    rates: list[tuple[float, float]] = []
    threads = store.options.io_threads
    memories = [NumpySlots().allocate(store.layout.slot_bytes).bytes for _ in range(threads)]
    files = ExpertFiles(store.files.stamps, store.files.direct)
    original = store.budget
    try:
        store.resize(max(store.smallest_budget, 2 * store.options.io_threads * store.payload))
        for turn in range(repeats + 1):
            mine_keys, probe_keys = _two_samples(store, turn)
            measured = {}
            for who in ("store", "probe") if turn % 2 else ("probe", "store"):
                if who == "store":
                    measured[who] = _store_rate(store, mine_keys)
                else:
                    places = [store.layout.place(*key) for key in probe_keys]
                    measured[who], _ = read_rate(files, places, store.layout.slot_bytes, threads, memories)
            mine, probe = measured["store"], measured["probe"]
            if turn:  # the first warms up
                rates.append((mine, probe))
    finally:
        files.close()
        store.resize(original)
    return {
        "store_bytes_per_second": statistics.median(mine for mine, _ in rates),
        "probe_bytes_per_second": statistics.median(probe for _, probe in rates),
        "ratio": statistics.median(mine / probe for mine, probe in rates),
        "ratios": [round(mine / probe, 3) for mine, probe in rates],
        "io_threads": store.options.io_threads,
        "direct_io": store.files.direct,
    }


def compare_decode(engine: Engine, repeats: int = REPEATS) -> dict[str, Any]:
    """Decode steps that read every expert, against the sum over layers of dense time + max(read, compute).

    Dense and expert compute time are those of the same steps with every expert in memory; read time is of the
    bytes of a layer at the rate of plain reads. `gain` is what lookahead takes off a step.
    """
    store = engine.backend.store
    original, setting = store.budget, store.lookahead.setting
    session = engine.session()
    session.feed(list(range(1, 9)))
    start = session.snapshot()
    rng = np.random.default_rng(0)
    ids = rng.integers(0, engine.config.vocab_size, STEPS).tolist()
    layers = len(store.layout.layers)
    rows: list[dict[str, float]] = []
    files = ExpertFiles(store.files.stamps, store.files.direct)
    try:
        for turn in range(repeats):
            store.resize(store.layout.count * store.payload)
            store.lookahead.setting = "off"
            with _replayed(session, start):
                _steps(engine, session, ids)  # brings what these steps need into memory
            with _replayed(session, start):
                inside = _steps(engine, session, ids)
            store.resize(store.smallest_budget)
            with _replayed(session, start):
                empty(store)
                outside = _steps(engine, session, ids)
            places = [store.layout.place(*key) for key in _two_samples(store, turn)[0]]
            rate, _ = read_rate(files, places, store.layout.slot_bytes, store.options.io_threads)
            store.lookahead.setting = "8"
            store.resize(3 * store.smallest_budget)
            with _replayed(session, start):
                empty(store)
                ahead = _steps(engine, session, ids)
            with _replayed(session, start):
                store.lookahead.setting = "off"
                empty(store)
                not_ahead = _steps(engine, session, ids)
            compute = inside["experts"] / layers
            read = outside["bytes"] / layers / rate
            dense = inside["total"] - inside["experts"]
            rows.append(
                {
                    "step": outside["total"],
                    "predicted": dense + layers * max(read, compute),
                    "dense": dense,
                    "compute": compute * layers,
                    "read": read * layers,
                    "waited": outside["wait"],
                    "rate": rate,
                    "with_lookahead": ahead["total"],
                    "without_lookahead": not_ahead["total"],
                }
            )
    finally:
        files.close()
        store.lookahead.setting = setting
        store.resize(original)
    result: dict[str, Any] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    result["ratio"] = statistics.median(row["step"] / row["predicted"] for row in rows)
    result["ratios"] = [round(row["step"] / row["predicted"], 3) for row in rows]
    result["lookahead_gain"] = statistics.median(
        1 - row["with_lookahead"] / row["without_lookahead"] for row in rows
    )
    return result


def measure_prompt(model: str | None, options: Mapping[str, Any], tokens: int, chunk: int) -> dict[str, Any]:
    """A prompt in chunks, the cache at its smallest: seconds, bytes read, distinct experts of all passes."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        with load(
            model,
            **{
                **options,
                "expert_cache": 0,
                "lookahead": "off",
                "prefill_step_size": chunk,
                "expert_trace": trace,
            },
        ) as engine:
            ids = np.random.default_rng(1).integers(0, engine.config.vocab_size, tokens).tolist()
            started = time.perf_counter()
            engine.session().feed(ids)
            seconds = time.perf_counter() - started
            report, payload = engine.report(), engine.backend.store.payload
        _, routings = read_trace(trace)
        distinct = sum(len(np.unique(routing.ids)) for routing in routings)
    return {
        "tokens": tokens,
        "chunk": chunk,
        "seconds": seconds,
        "bytes_read": report["experts"]["bytes_read"],
        "hits": report["experts"]["hits"],
        "distinct_experts_of_passes": distinct,
        "expert_bytes": payload,
        "exact": report["experts"]["bytes_read"] == (distinct - report["experts"]["hits"]) * payload,
        "wait_seconds": report["experts"]["wait_seconds"],
        "peak_memory": format_size(report["peak_memory_bytes"]),
    }


def empty(store: ExpertStore) -> None:
    """Have nothing in memory, without a change of the budget."""
    with store.lock:
        while store.reading:
            store.lock.wait()
    store.drop_all()


def _store_rate(store: ExpertStore, keys: list[Key]) -> float:
    """Bytes a second of fetching experts that are not in memory, layer by layer, with no arithmetic."""
    empty(store)
    started = time.perf_counter()
    for layer in store.layout.layers:
        for _ in store.fetch(layer, [expert for at, expert in keys if at == layer]):
            pass
    return len(keys) * store.payload / (time.perf_counter() - started)


def _two_samples(store: ExpertStore, turn: int) -> tuple[list[Key], list[Key]]:
    """Two sets of experts that have none in common, other ones each turn as long as there are any."""
    keys = [(layer, expert) for layer in store.layout.layers for expert in range(store.layout.experts)]
    order = np.random.default_rng(turn).permutation(len(keys)).tolist()
    count = min(PROBED, len(keys) // 2)
    return [keys[n] for n in sorted(order[:count])], [keys[n] for n in sorted(order[count : 2 * count])]


@contextmanager
def _replayed(session: Session, start: Any) -> Iterator[None]:
    session.restore(start)
    yield


def _steps(engine: Engine, session: Session, ids: Sequence[int]) -> dict[str, float]:
    """Seconds of one step and of its experts' arithmetic, its bytes read and its wait, as means over ids."""
    before = engine.report()
    started = time.perf_counter()
    for id in ids:
        session.feed([id])
    total = time.perf_counter() - started
    after = engine.report()
    count = len(ids)
    experts, old = after["experts"], before["experts"]
    return {
        "total": total / count,
        "experts": (after["seconds"]["experts"] - before["seconds"]["experts"]) / count,
        "bytes": (experts["bytes_read"] - old["bytes_read"]) / count,
        "wait": (experts["wait_seconds"] - old["wait_seconds"]) / count,
    }
