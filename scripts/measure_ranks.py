"""What each rank reads and sends of a model, against the figures of `k3mlx plan --ranks`.

    python scripts/measure_ranks.py MODEL
    mlx.launch -n 2 -- python scripts/measure_ranks.py MODEL [--dense-parallel]

Rank 0 prints a table, --json writes it; alone the same ids give what to compare with. Random ids, so no vocabulary is
needed. An expert that is read by a rank that does not own it is an error. On one machine ranks share cores and disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import k3mlx
from k3mlx.config import load_config
from k3mlx.experts.store import ExpertStore
from k3mlx.planning.ranks import traffic
from k3mlx.ranks.launch import launched_rank
from k3mlx.ranks.owners import own


def main() -> int:
    args = _parser().parse_args()
    rank, size = launched_rank() or 0, int(os.environ.get("MLX_WORLD_SIZE", 0)) or _ring_size()
    strangers = _watch(rank, size)
    ids = np.random.default_rng(args.seed).integers(
        0, load_config(args.model).vocab_size, args.prompt + args.tokens
    )
    options = {name: getattr(args, name) for name in ("memory", "expert_cache", "dtype", "dense_parallel")}
    try:
        with k3mlx.load(args.model, backend="mlx", device=args.device, **options) as engine:
            session = engine.session()
            session.feed(ids[: args.prompt].tolist())
            for id in ids[args.prompt :].tolist():
                logits = session.feed([id])
            report = engine.report()
            found = _compare(report, engine.config, size, args, float(logits.astype(np.float64).sum()))
    finally:
        if strangers:
            print(f"rank {rank} has read experts of other ranks: {strangers[:5]}", file=sys.stderr)
    if strangers:
        return 1
    print("\n".join(f"{name:42} {' '.join(map(_shown, values))}" for name, values in found.items()))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--prompt", type=int, default=8, metavar="N", help="ids of the first pass (default: 8)"
    )
    parser.add_argument(
        "--tokens", type=int, default=16, metavar="N", help="ids fed one by one (default: 16)"
    )
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--expert-cache", default=0, help="default: 0, so that every expert used is read")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dense-parallel", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _ring_size() -> int:
    hostfile = os.environ.get("MLX_HOSTFILE")
    return len(json.loads(Path(hostfile).read_text("utf-8"))) if hostfile else 1


def _watch(rank: int, size: int) -> list[tuple[int, int]]:
    """Note every read of an expert that is not this rank's."""
    strangers: list[tuple[int, int]] = []
    fill = ExpertStore._fill

    def watched(store: ExpertStore, entry: Any, job: Any) -> None:
        if not own(entry.key[0], [entry.key[1]], rank, size):
            strangers.append(entry.key)
        fill(store, entry, job)

    ExpertStore._fill = watched  # type: ignore[method-assign]
    return strangers


def _compare(
    report: dict[str, Any], config: Any, size: int, args: argparse.Namespace, total: float
) -> dict[str, list[Any]]:
    """Rows of the table: a name and its values, by rank or measured and predicted."""
    ranks = report["ranks"] or [{"rank": 0, "experts": report["experts"], "traffic": None}]
    passes, tokens = 1 + args.tokens, args.prompt + args.tokens
    rows: dict[str, list[Any]] = {
        "expert bytes read, by rank": [row["experts"]["bytes_read"] for row in ranks],
        "of all": [row["experts"]["bytes_read"] / _sum(ranks) for row in ranks],
        "peak memory of rank 0": [report["peak_memory_bytes"]],
        "dense bytes read by rank 0 after loading": [report["dense"]["bytes_read"]],
        "seconds a token": [report["seconds"]["decode"] / args.tokens],
        "sum of the last logits": [total],
    }
    if size == 1:
        return rows
    paper = traffic(config, size, args.dense_parallel)
    sent = ranks[0]["traffic"]
    predicted = sum(paper.bytes_in(n) for n in (args.prompt, *[1] * args.tokens)) * (size - 1)
    assert predicted == (size - 1) * 4 * (tokens * paper.per_token + passes * paper.per_pass)
    rows |= {
        "messages a pass, measured, predicted": [sent["messages"] / passes, paper.messages],
        "messages of a layer with experts": [paper.layer_messages],
        "bytes sent, measured, predicted": [sent["bytes_sent"], predicted],
        "bytes of a token to each other rank": [paper.bytes_in(1)],
        "seconds waited for messages, by rank": [row["traffic"]["seconds"] for row in ranks],
    }
    return rows


def _sum(ranks: list[dict[str, Any]]) -> int:
    return max(1, sum(row["experts"]["bytes_read"] for row in ranks))


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


if __name__ == "__main__":
    raise SystemExit(main())
