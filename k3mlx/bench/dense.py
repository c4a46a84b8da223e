"""Dense weights that do not fit, read at each use: `k3mlx bench --streaming dense`.

Compares the bytes that a decode step reads, of dense weights and experts, over the time that it takes, with plain
parallel reads of the same weights, turn and turn about.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from k3mlx.checkpoint.names import layer_specs
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.dense_reads import PIECE
from k3mlx.engine import Engine
from k3mlx.errors import UsageError
from k3mlx.experts.files import ExpertFiles
from k3mlx.experts.layout import Piece, Placement
from k3mlx.experts.probe import drop_cached, read_rate
from k3mlx.experts.slots import ALIGN


def compare_dense(engine: Engine, checkpoint: Checkpoint, repeats: int) -> dict[str, Any]:
    """Steps that read layers and experts, and plain reads of those layers, with the same threads.

    `ratio` is the median over repeats of (bytes of a step / its seconds) / (rate of the reads next to it). Each
    timed step follows another at once, so that it begins as it ends, with its first layer on the way. Raises
    UsageError when all layers are in memory.
    """
    plan = engine.governor.plan
    streamed = [n for n in range(engine.config.num_hidden_layers) if n not in plan.resident]
    if not streamed:
        raise UsageError("streaming dense: all dense weights are in memory, expected a smaller --memory")
    places = _pieces(checkpoint, streamed)
    session = engine.session()
    rows = []
    for turn in range(repeats):
        rate = _plain_rate(engine, places)
        session.feed([turn % engine.config.vocab_size])
        rows.append(_step(engine, session, turn % engine.config.vocab_size) | {"probe": rate})
    ratios = [(row["dense"] + row["experts"]) / row["seconds"] / row["probe"] for row in rows]
    return {
        "streamed_layers": len(streamed),
        "predicted_dense_bytes": plan.dense_bytes_per_pass,
        "dense_bytes": [row["dense"] for row in rows],
        "expert_bytes": [row["experts"] for row in rows],
        "step_seconds": statistics.median(row["seconds"] for row in rows),
        "wait_seconds": statistics.median(row["wait"] for row in rows),
        "probe_bytes_per_second": statistics.median(row["probe"] for row in rows),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _step(engine: Engine, session: Any, id: int) -> dict[str, Any]:
    """Seconds of a step, bytes of dense weights and of experts that came meanwhile, seconds waited for the former."""
    before, started = engine.report(), perf_counter()
    session.feed([id])
    seconds, after = perf_counter() - started, engine.report()
    return {
        "seconds": seconds,
        "dense": after["dense"]["bytes_read"] - before["dense"]["bytes_read"],
        "experts": after["experts"]["bytes_read"] - before["experts"]["bytes_read"],
        "wait": after["dense"]["wait_seconds"] - before["dense"]["wait_seconds"],
    }


def _plain_rate(engine: Engine, places: Sequence[Placement]) -> float:
    store = engine.backend.store
    files = ExpertFiles(store.files.stamps, store.files.direct)
    try:
        if not files.direct:
            drop_cached(places)
        rate, _ = read_rate(files, places, PIECE + 2 * ALIGN, store.options.io_threads)
    finally:
        files.close()
    return rate


def _pieces(checkpoint: Checkpoint, layers: Sequence[int]) -> list[Placement]:
    """The plain tensors of these layers as single reads."""
    found = []
    for layer in layers:
        for spec in layer_specs(checkpoint.config, layer):
            info = checkpoint.tensors[spec.name]
            for start in range(0, info.nbytes, PIECE):
                offset, size = info.offset + start, min(PIECE, info.nbytes - start)
                found.append(Placement((Piece(info.path, offset, size, offset % ALIGN),), {}))
    return found
