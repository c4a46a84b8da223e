"""Lookahead that measures itself, traces, and lists of what was in memory."""

import json

import numpy as np
import pytest

import k3mlx
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.errors import ModelFilesError, UsageError
from k3mlx.experts.layout import ExpertLayout
from k3mlx.experts.lookahead import MEMORY, SAMPLE, TRIAL, Lookahead
from k3mlx.experts.trace import TraceWriter, read_trace
from k3mlx.experts.warm import load_residency, residency_path, save_residency

from .models import write_streaming_model


def ids(*experts):
    return np.array([experts])


def teach(lookahead, right, times, ranks=6):
    """Guess `ranks` experts so often, the ranks in `right` coming true."""
    told = []
    for _ in range(times):
        if lookahead.wanted(1, 1):
            told = lookahead.guess(2, range(ranks))
            lookahead.learn(2, ids(*[n if n in right else n + 50 for n in range(ranks)]))
    return told


def test_only_ranks_that_come_true_are_read_ahead():
    lookahead = Lookahead("auto", 6)
    assert lookahead.depth() == 0
    assert lookahead.guess(2, range(6)) == []  # nothing is known yet
    teach(lookahead, {0, 1, 3}, TRIAL + 40)
    assert teach(lookahead, {0, 1, 3}, 1) == [0, 1, 3]
    assert lookahead.depth() == 3
    assert lookahead.report()["lookahead_recall"] == pytest.approx(0.5, abs=0.02)


def test_it_switches_itself_off_and_on_again():
    lookahead = Lookahead("auto", 6)
    teach(lookahead, {0, 1, 2, 3, 4, 5}, TRIAL + 5)
    assert lookahead.depth() == 6
    teach(lookahead, set(), int(2 / MEMORY))
    assert lookahead.depth() == 0
    asked = [lookahead.wanted(layer, 1) for _ in range(4 * SAMPLE) for layer in (1, 2)]
    assert asked.count(True) == 8  # two layers of every sixteenth token
    for _ in range(int(4 / MEMORY) * SAMPLE):
        teach(lookahead, {0, 1, 2, 3, 4, 5}, 1)
    assert lookahead.depth() == 6


def test_off_and_fixed_depths():
    off = Lookahead("off", 6)
    assert not off.wanted(1, 1)
    fixed = Lookahead("3", 6)
    assert fixed.wanted(1, 1)
    assert not fixed.wanted(1, 2)  # prompts touch nearly all experts anyway
    assert fixed.guess(2, range(6)) == [0, 1, 2]
    teach(fixed, set(), 300)
    assert fixed.guess(2, range(6)) == [0, 1, 2]
    assert Lookahead("9", 6).ranks == 9


def test_recall_of_a_run_is_of_its_own_routers(tmp_path):
    """The next layer's router on this layer's input, against what it chose: by hand from the trace."""
    folder = write_streaming_model(tmp_path / "model")
    seen = {}
    with k3mlx.load(
        folder, backend="numpy", expert_cache=0, lookahead=3, expert_trace=tmp_path / "trace"
    ) as engine:
        store, layers = engine.backend.store, engine.backend.model.layers
        session = engine.session()
        session.feed([4, 2])
        inputs = {}

        def probe(stage, array):
            if stage.endswith("mlp_norm"):
                inputs[int(stage.split(".")[1])] = array

        for id in (7, 1, 30):
            engine.backend.forward(
                [id], session.snapshot().state, False, k3mlx.reference.model.Hooks(probe=probe)
            )
            for layer in (2, 3):
                w = layers[layer].ffn
                scores = 1 / (1 + np.exp(-(inputs[layer - 1] @ w["gate"].T)))
                ranked = np.argsort(-(scores + w["gate.e_score_correction_bias"])[0], kind="stable")
                seen.setdefault(layer, []).append(set(ranked[:3].tolist()))
        recall = store.lookahead.report()["lookahead_recall"]
    _, routings = read_trace(tmp_path / "trace")
    chosen = {2: [], 3: []}
    for routing in routings:
        if len(routing.ids) == 1 and routing.layer in chosen:
            chosen[routing.layer].append(set(routing.ids[0].tolist()))
    right = [len(a & b) for layer in (2, 3) for a, b in zip(seen[layer], chosen[layer], strict=True)]
    assert recall == pytest.approx(sum(right) / 18)


def test_a_trace_reads_back(tmp_path):
    path = tmp_path / "trace"
    writer = TraceWriter(path, 9, 2)
    writer.record(1, np.array([[3, 4], [4, 8]]))
    writer.record(2, np.array([[0, 1]]))
    writer.close()
    sizes, routings = read_trace(path)
    assert sizes == {"experts": 9, "per_token": 2}
    assert [(r.layer, r.ids.tolist()) for r in routings] == [(1, [[3, 4], [4, 8]]), (2, [[0, 1]])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a trace"), ("{}", "gives no sizes"), ("no json", "not a trace"),
        ('{"experts":9,"per_token":2}\n{"layer":1}', "line 2 is no routing"),
        ('{"experts":9,"per_token":2}\n{"layer":1,"ids":[1]}', "line 2 is no routing"),
        ('{"experts":9,"per_token":2}\n{"layer":1,"ids":[[1],[1,2]]}', "line 2 is no routing"),
    ],
)  # fmt: skip
def test_what_is_no_trace(tmp_path, text, message):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ModelFilesError, match=message):
        list(read_trace(path)[1])


def test_a_trace_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match=r"--expert-trace .* cannot be written"):
        TraceWriter(tmp_path / "none" / "trace", 9, 2)


def test_lists_of_experts_are_hints(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layout, path = ExpertLayout(checkpoint), residency_path(checkpoint.folder)
    assert load_residency(path, layout) == []
    save_residency(path, [(1, 8), (3, 0)])
    assert load_residency(path, layout) == [(1, 8), (3, 0)]
    path.write_text(
        json.dumps([[1, 8], [0, 1], [1, 9], [1, -1], [True, 2], "x", [2], [2, 2.0], [1, 8], [2, 5]])
    )
    assert load_residency(path, layout) == [(1, 8), (2, 5)]
    for text in ("{}", "[[", "null", "[" * 100_000):
        path.write_text(text)
        assert load_residency(path, layout) == []
    save_residency(tmp_path / "file" / "below", [])
    (tmp_path / "plain").write_text("")
    save_residency(tmp_path / "plain" / "list", [(1, 1)])  # no folder: no error


def test_each_model_has_its_list(packed_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert residency_path(packed_folder) != residency_path(tmp_path)
    assert residency_path(packed_folder) == residency_path(packed_folder / ".." / packed_folder.name)
    with Checkpoint.open(packed_folder) as checkpoint:
        assert ExpertLayout(checkpoint).count == 27
