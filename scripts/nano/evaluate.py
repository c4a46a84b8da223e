"""Measure k3-nano through the k3mlx engine on numpy: held-out conversations by kind, and held-out prose.

    python -m scripts.nano.evaluate --prose DIR --prompts 200

A prompt counts as right when greedy decoding produces the expected message whole: its thinking, its text or
tool calls, and the end of the message. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import k3mlx

from .data import Encoder, evaluation_set, evaluation_talks
from .tasks import prose_material

if TYPE_CHECKING:
    from k3mlx.engine import Engine

MODEL = Path(k3mlx.__file__).parent / "models" / "k3-nano"
PROSE_ROWS, PROSE_TOKENS = 64, 512
Example = tuple[list[int], int]


def is_right(engine: Engine, ids: list[int], start: int) -> bool:
    """Whether greedy decoding after ids[:start] gives exactly ids[start:].

    One pass over all of ids: greedy decoding stays on the expected path exactly while each expected token is the
    most likely one after those before it.
    """
    logits = engine.session().feed(ids[:-1], all_logits=True)
    return logits[start - 1 :].argmax(-1).tolist() == ids[start:]


def prose_nats(engine: Engine, rows: list[list[int]]) -> float:
    """Mean nats per token over rows of ids, each read on its own."""
    total, count = 0.0, 0
    for row in rows:
        logits = engine.session().feed(row[:-1], all_logits=True).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(len(row) - 1), row[1:]]
        total += float((np.log(np.exp(logits).sum(-1)) - chosen).sum())
        count += len(chosen)
    return total / count


def prose_rows(encoder: Encoder, text: str) -> tuple[list[list[int]], list[list[int]]]:
    """Rows spread evenly over a text, wherever they fall; and the start of each passage."""
    ids = encoder.prose(text).tolist()
    count = min(PROSE_ROWS, (len(ids) - 1) // PROSE_TOKENS)
    starts = [row * (len(ids) - PROSE_TOKENS - 1) // max(1, count - 1) for row in range(count)]
    anywhere = [ids[start : start + PROSE_TOKENS + 1] for start in starts]
    return anywhere, [encoder.tokenizer.encode(passage)[: PROSE_TOKENS + 1] for passage in text.split("\f")]


def _measure(job: tuple[Path, str, list[Example]]) -> tuple[str, int, int]:
    model, label, examples = job
    with k3mlx.load(model, backend="numpy") as engine:
        return label, sum(is_right(engine, *example) for example in examples), len(examples)


def results(model: Path, sets: dict[str, list[Example]], processes: int) -> Iterator[tuple[str, int, int]]:
    """(label, right, asked) of each kind as it is done."""
    jobs = [(model, label, examples) for label, examples in sets.items()]
    if processes == 1:
        yield from map(_measure, jobs)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap(_measure, jobs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--prose", type=Path, required=True, help="folder with prose.txt and prose_held_out.txt"
    )
    parser.add_argument("--prompts", type=int, default=200, help="prompts of each kind")
    parser.add_argument(
        "--seed", type=int, default=11, help="draws the prompts; training never sees any of them"
    )
    parser.add_argument("--write", type=Path, help="only write the conversations to this file, as JSON")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    material = prose_material((args.prose / "prose.txt").read_text("utf-8"))
    if args.write:
        talks = evaluation_talks(material, args.prompts, args.seed)
        plain = [{"label": label, **talk._asdict()} for label, part in talks.items() for talk in part]
        args.write.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        return
    encoder = Encoder(args.model)
    sets = evaluation_set(encoder, material, args.prompts, args.seed)
    began = time.monotonic()
    for label, right, asked in results(args.model, sets, args.processes):
        print(f"| {label} | {right} of {asked} | {100 * right / asked:.1f} % |", flush=True)
    anywhere, from_start = prose_rows(encoder, (args.prose / "prose_held_out.txt").read_text("utf-8"))
    with k3mlx.load(args.model, backend="numpy") as engine:
        print(f"held-out prose, rows from anywhere: {prose_nats(engine, anywhere):.3f} nats per token")
        print(f"held-out prose, starts of passages: {prose_nats(engine, from_start):.3f} nats per token")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
