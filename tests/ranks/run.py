"""What each rank of a test does: `python -m tests.ranks.run OUT FOLDER ACTION …`, started by tests/ranks/launch.py.

Rank 0 writes one JSON object to OUT. ACTION is `conversations`, or `logits IDS SPLIT` (a prompt in two parts and then
steps), or `decode N`: N steps, its progress in OUT.
"""

import json
import sys
from pathlib import Path

import numpy as np

import k3mlx
from tests.model.conversations import PROMPTS, greedy_answers


def conversations(engine, out):
    out.write_text(json.dumps({"answers": greedy_answers(engine, PROMPTS[::6]), "report": engine.report()}))


def logits(engine, out, ids, split):
    ids, split = json.loads(ids), int(split)
    session = engine.session()
    rows = [session.feed(ids[:split]), session.feed(ids[split:-20])]
    rows += [session.feed([id]) for id in ids[-20:]]
    np.save(out.with_suffix(".npy"), np.array(rows))
    out.write_text(json.dumps({"report": engine.report()}))


def decode(engine, out, count):
    session = engine.session()
    best = int(np.argmax(session.feed([3, 1, 4, 1, 5])))
    for step in range(int(count)):
        best = int(np.argmax(session.feed([best])))
        out.write_text(json.dumps({"steps": step + 1}))


def main(out, folder, action, *arguments):
    folder = None if folder == "-" else folder
    with k3mlx.load(folder, device="cpu", dtype="float32", expert_cache=0) as engine:
        {"conversations": conversations, "logits": logits, "decode": decode}[action](
            engine, Path(out), *arguments
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
