"""A greedy run in which one step goes wrong on purpose: `python -m tests.model.faulty_run FOLDER WHERE HOW STEP`.

WHERE is `kernel` (a stand-in for the KDA kernel that computes what the plain operations do) or `experts`; HOW is
`build` (throws while the graph is built), `worker` (throws on a worker at evaluation), `never` (an evaluation that
does not return) or `none`. STEP counts forward passes from 1. Prints one JSON object with ids and report.
"""

import json
import sys

import mlx.core as mx
import numpy as np

import k3mlx
from k3mlx.kernels import Kernels, plain
from k3mlx.model.moe import ExpertStreams

PROMPT, TOKENS = [3, 1, 4, 1, 5, 9, 2, 6], 12


def spoil(how, array):
    """`array`, spoilt: now, when it is evaluated, or for ever."""
    if how == "build":
        raise RuntimeError("a failure while the graph is built")
    if how == "worker":
        return array + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]
    product = mx.ones((6000, 6000))
    for _ in range(100):
        product = product @ product
    return array + product[0, 0]


class StandIn:
    """A maker of kernels that are the plain operations on the CPU, one launch of which is spoilt."""

    name = "stand-in"

    def __init__(self, how, failing):
        self.how, self.failing, self.step = how, failing, 0

    def build(self, spec):
        assert spec.stem in ("kda_step", "kda_prefill")

        def launch(inputs, **keywords):
            *arrays, _, numbers = inputs
            out = list(plain.kda_step(*arrays, *numbers[:3]))
            if self.step == self.failing:
                out[0] = spoil(self.how, out[0])
            return out

        return launch

    def floats(self, values):
        return list(values)

    def ints(self, values):
        return list(values)

    def dtype(self, name):
        return getattr(mx, name)


class FaultyStreams(ExpertStreams):
    how, failing, step = "none", 0, 0

    def mix(self, x, *arguments):
        return super().mix(spoil(self.how, x) if self.step == self.failing else x, *arguments)


def main(folder, where, how, failing):
    failing = int(failing) if how != "none" else -1
    with k3mlx.load(folder, backend="mlx", device="cpu") as engine:
        room = engine.backend.room
        if where == "kernel":
            fault = StandIn(how, failing)
            room.kernels = Kernels(fault)
            for stem in ("attn_res_mix", "route_topk"):
                room.kernels.disable(stem, "not part of this run", failed=False)
        else:
            fault = room.experts
            fault.__class__, fault.how, fault.failing = FaultyStreams, how, failing
        if how == "never":
            engine.backend.watchdog.scale = 0.02
        session, ids = engine.session(), []
        fault.step = 1
        logits = session.feed(PROMPT)
        for fault.step in range(2, TOKENS + 1):
            ids.append(int(np.argmax(logits)))
            logits = session.feed(ids[-1:])
        state = {
            name: float(np.abs(a).sum()) for name, a in engine.backend.export_state(session._state).items()
        }
        report = engine.report()
        print(json.dumps({"ids": ids, "state": state, "parts": report["parts"], "fed": session.ids}))


if __name__ == "__main__":
    main(*sys.argv[1:])
