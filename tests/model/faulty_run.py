"""A greedy run in which one step goes wrong on purpose: `python -m tests.model.faulty_run FOLDER WHERE HOW STEP`.

WHERE is `kernel` (a stand-in for the KDA kernel that computes what the plain operations do), `experts`, or `gpu` (the
KDA kernel itself, on a GPU). HOW is `build` (throws while the graph is built), `worker` (throws on a worker at
evaluation), `never` (an evaluation that does not return), `none`; or on a GPU `compile` (a text that is no kernel) or
`off` (no kernels). STEP counts forward passes from 1. Prints one JSON object with ids and report.
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


class Uncompilable:
    """The maker of a GPU; at the failing step the text of the KDA kernel is one that no compiler takes."""

    def __init__(self, maker, failing):
        self.maker, self.failing, self.step = maker, failing, 0

    def __getattr__(self, name):
        return getattr(self.maker, name)

    def build(self, spec):
        good = self.maker.build(spec)
        make = mx.fast.cuda_kernel if self.maker.name == "cuda" else mx.fast.metal_kernel
        bad = make(
            name="k3_uncompilable",
            input_names=list(spec.input_names),
            output_names=list(spec.output_names),
            source="this is no statement;",
        )
        faulty = spec.stem in ("kda_step", "kda_prefill")
        return lambda **keywords: (bad if faulty and self.step == self.failing else good)(**keywords)


class FaultyStreams(ExpertStreams):
    how, failing, step = "none", 0, 0

    def _outputs(self, x, *arguments):
        return super()._outputs(spoil(self.how, x) if self.step == self.failing else x, *arguments)


def plant(room, where, how, failing):
    """Put the fault in its place; its `step` says which pass is running."""
    if where == "experts":
        fault = room.experts
        fault.__class__, fault.how, fault.failing = FaultyStreams, how, failing
        return fault
    if where == "gpu":
        fault = Uncompilable(room.kernels.maker, failing)
        room.kernels.maker = fault
        if how == "off":
            room.kernels.disable_all("switched off for a comparison")
        return fault
    fault = StandIn(how, failing)
    room.kernels = Kernels(fault)
    for stem in ("attn_res_mix", "route_topk"):
        room.kernels.disable(stem, "not part of this run", failed=False)
    return fault


def main(folder, where, how, failing):
    failing = int(failing) if how not in ("none", "off") else -1
    device = "gpu" if where == "gpu" else "cpu"
    options = {"experts_kernel": "stream"} if where == "experts" else {}
    with k3mlx.load(folder, backend="mlx", device=device, dtype="float32", **options) as engine:
        fault = plant(engine.backend.room, where, how, failing)
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
