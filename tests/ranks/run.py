"""What each rank of a test does: `python -m tests.ranks.run OUT FOLDER OPTIONS ACTION …`, started by `launch.py`.

Rank 0 writes one JSON object to OUT. ACTION is `conversations`, `golden`, `logits IDS SPLIT` (a prompt in two parts and
then steps), `sessions SAVED` (points come back to, saved, read again), or `decode N`: N steps, its progress in OUT.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np

import k3mlx
from k3mlx.engine import Cancelled
from k3mlx.errors import K3Error
from k3mlx.experts import store
from k3mlx.experts.store import ExpertStore
from tests.model.conversations import PROMPTS, greedy_answers

KEPT = 5 << 20  # bytes for sessions, which only rank 0 is told


def conversations(engine, out):
    out.write_text(json.dumps({"answers": greedy_answers(engine, PROMPTS[::6]), "report": engine.report()}))


def logits(engine, out, ids, split):
    ids, split = json.loads(ids), int(split)
    session = engine.session()
    rows = [session.feed(ids[:split]), session.feed(ids[split:-20])]
    rows += [session.feed([id]) for id in ids[-20:]]
    np.save(out.with_suffix(".npy"), np.array(rows))
    out.write_text(json.dumps({"report": engine.report()}))


def golden(engine, out):
    session = engine.session()
    session.feed(range(1, 9))
    rows = [session.feed([id]) for id in range(9, 20)]
    np.save(out.with_suffix(".npy"), np.array(rows))
    out.write_text(json.dumps({"report": engine.report()}))


def sessions(engine, out, saved):
    """Rows of logits by a timeline with all that a session can do; `saved` is a session file of one process."""
    first, second, rows = engine.session(), engine.session(), []
    first.feed([3, 1, 4, 1, 5])
    point = first.snapshot()
    rows += [second.feed([9, 2, 6]), first.feed([2, 7]), second.feed([5])]
    first.restore(point)
    rows.append(first.feed([8, 2, 8]))
    with contextlib.suppress(Cancelled):
        first.feed([1, 8], should_stop=iter([False, False, True]).__next__)
    rows.append(first.feed([1]))
    first.save(out.with_suffix(".safetensors"))
    again = engine.load_session(out.with_suffix(".safetensors"))
    rows += [again.feed([8]), first.feed([8]), engine.load_session(saved).feed([8])]
    for _ in range(20):
        again.feed([3])
    np.save(out.with_suffix(".npy"), np.array(rows))
    out.write_text(json.dumps({"report": engine.report()}))


def decode(engine, out, count):
    session = engine.session()
    best = int(np.argmax(session.feed([3, 1, 4, 1, 5])))
    for step in range(int(count)):
        best = int(np.argmax(session.feed([best])))
        out.write_text(json.dumps({"steps": step + 1}))


def note_reads(out):
    """Keep in OUT.reads.RANK which experts this rank has read, and whether into MLX's memory. A model of any size may
    have a warm start."""
    target, read, fill = out.with_suffix(f".reads.{os.environ['MLX_RANK']}"), set(), ExpertStore._fill

    def noted(self, entry, job):
        read.add(entry.key)
        target.write_text(json.dumps({"read": sorted(read), "mlx": entry.memory.owner is not None}))
        fill(self, entry, job)

    ExpertStore._fill, store.WARM_MIN_BYTES = noted, 0


def main(out, folder, options, action, *arguments):
    if action == "logits":
        note_reads(Path(out))
    folder = None if folder == "-" else folder
    options = {"device": "cpu", "dtype": "float32", "expert_cache": 0, **json.loads(options)}
    with k3mlx.load(folder, **options, session_memory=KEPT if os.environ["MLX_RANK"] == "0" else 0) as engine:
        actions = (conversations, golden, logits, sessions, decode)
        {each.__name__: each for each in actions}[action](engine, Path(out), *arguments)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except K3Error as error:
        sys.exit(f"k3mlx: error: {error}")  # a traceback would be cut by the end of the process
