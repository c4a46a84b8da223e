"""Repeats of the whole model, and the figures made of them."""

import copy
import time
from dataclasses import replace

import numpy as np
import pytest

import k3mlx
from k3mlx import engine as engine_module
from k3mlx.bench.figures import SPLIT, figures_of_trials, split
from k3mlx.bench.whole import random_ids, run_trial, run_trials, text_ids
from k3mlx.errors import ResourceError, UsageError
from k3mlx.experts import filling, native
from k3mlx.kernels import cpu, cpu_queue


def test_each_repeat_feeds_its_own_ids_in_a_new_session(engine, monkeypatch):
    fed = []
    original = k3mlx.Session.feed

    def feed(session, ids, *rest, **more):
        fed.append((len(session), list(ids)))
        return original(session, ids, *rest, **more)

    monkeypatch.setattr(k3mlx.Session, "feed", feed)
    ids = random_ids(512, 7)
    told = []
    trials = run_trials(engine, ids, 5, 2, told.append)
    assert fed == [
        step
        for number in range(3)
        for step in ((0, ids(number)[:5]), (5, ids(number)[5:6]), (6, ids(number)[6:]))
    ]
    assert ids(1) != ids(2)
    assert told == trials
    assert len(trials) == 2


def test_what_is_noted_of_a_repeat(byte_model):
    with k3mlx.load(byte_model, expert_cache=0) as engine:
        run_trial(engine, [9, 8, 7], 2)
        trial = run_trial(engine, [1, 2, 3, 4, 5, 6], 4)
    assert trial.prompt["prompt_tokens"] == 4
    assert trial.decode["decode_steps"] == 2
    for name, counts in (("hits", trial.step_hits), ("misses", trial.step_misses)):
        assert trial.decode["experts"][name] == sum(counts)
    assert sum(trial.step_misses) > 0
    assert trial.prompt["seconds"]["prefill"] <= trial.prompt_seconds
    assert trial.decode["seconds"]["decode"] <= trial.decode_seconds
    assert trial.prompt["seconds"]["decode"] == trial.decode["seconds"]["prefill"] == 0


def test_ids_of_a_text_are_its_pieces_and_must_suffice():
    ids = text_ids(list(range(12)), 4, 3)
    assert [list(ids(n)) for n in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(UsageError, match="the text is 11 ids long; expected 12: 4 for each of 3 passes"):
        text_ids(list(range(11)), 4, 3)


@pytest.fixture
def trial(engine):
    return run_trial(engine, [1, 2, 3, 4, 5, 6], 4)


def test_the_split_adds_up_to_the_wall_time(trial):
    for seconds, report in ((trial.prompt_seconds, trial.prompt), (trial.decode_seconds, trial.decode)):
        parts = split(seconds, report)
        assert sum(parts[part] for part in SPLIT) == pytest.approx(seconds, rel=1e-6)
        assert min(parts.values()) >= 0
        for part in ("attention", "router", "mlp", "experts", "head", "other"):
            assert parts[part] > 0, part
        assert "python" not in parts


def test_loading_behind_other_work_and_host_work(trial):
    report = copy.deepcopy(trial.decode)
    report["dense"] |= {"wait_seconds": 0.25}
    report["experts"] |= {"read_seconds": 5.0, "wait_seconds": 2.0}
    report["seconds"] = dict.fromkeys(report["seconds"], 1.0) | {"expert_wait": 2.0}
    report["runtime"]["product_seconds"] = 4.0
    parts = split(10.0, report)
    assert parts["hidden"] == 3.0
    assert (parts["dense_wait"], parts["other"]) == (0.25, 0.75)
    assert parts["python"] == 8.0 - 4.0 - 2.0 - 0.25
    assert parts["outside"] == 2.0


def test_figures_are_a_token_s(trial):
    figures = figures_of_trials([trial, trial], 4)
    assert figures["prompt_rate"].values == (4 / trial.prompt_seconds,) * 2
    assert figures["decode_rate"].median == pytest.approx(2 / sum(trial.step_seconds))
    for phase, tokens, seconds in (("prompt", 4, trial.prompt_seconds), ("decode", 2, trial.decode_seconds)):
        whole = sum(figures[f"{phase}_{part}"].median for part in SPLIT)
        assert whole == pytest.approx(1e3 * seconds / tokens, rel=1e-6)
    experts = trial.decode["experts"]
    found = experts["hits"] / (experts["hits"] + experts["misses"])
    assert figures["decode_hit_rate"].median == pytest.approx(found)
    assert figures["decode_read"].median == pytest.approx(experts["bytes_read"] / 2 / 1e9)


def test_without_decode_steps_there_are_no_figures_of_any(engine):
    figures = figures_of_trials([run_trial(engine, [1, 2, 3], 3)], 3)
    assert "prompt_rate" in figures
    assert not [name for name in figures if name.startswith("decode")]


def test_on_mlx_the_router_is_evaluated_with_attention(byte_model):
    pytest.importorskip("mlx.core")
    with k3mlx.load(byte_model, backend="mlx", device="cpu") as engine:
        trial = run_trial(engine, [1, 2, 3, 4, 5, 6], 4)
    figures = figures_of_trials([trial], 4)
    assert figures["decode_router"].high == 0
    assert 0 < figures["decode_python"].median < 1e3 * trial.decode_seconds / 2


def late(function):
    return lambda *rest, **more: (time.sleep(LATE), function(*rest, **more))[1]


def late_host(engine, patch):
    patch.setattr(engine.governor, "check", late(engine.governor.check))


def late_experts(engine, patch):
    original = native.NativeExperts._mix

    def mix(experts, *rest):
        result = original(experts, *rest)
        experts._kernels._call(lambda: time.sleep(LATE) or 0)
        return result

    patch.setattr(native.NativeExperts, "_mix", mix)


def late_attention(engine, patch):
    if engine.backend.name == "numpy":
        library = cpu_queue._library()

        class Late:
            def k3_sequence(self, handle, threads, words, count, seconds):
                status, at = library.k3_sequence(handle, threads, words, count, seconds), 0
                for job in range(count):
                    if words[at] in (cpu_queue.Kind.KDA, cpu_queue.Kind.ATTENTION):
                        time.sleep(LATE)
                        seconds[job] += LATE
                    at += 2 + words[at + 1]
                return status

        patch.setattr(cpu_queue, "_library", Late)
    else:
        import mlx.core as mx

        from k3mlx.model import room

        whole = mx.eval
        patch.setattr(room.mx, "eval", late(whole))


def late_reads(engine, patch):
    patch.setattr(filling, "_read_pieces", late(filling._read_pieces))


def late_layers(engine, patch):
    ring = engine.backend.model.layers
    patch.setattr(ring, "_begin", lambda layer, begin=ring._begin: late(begin(layer)))


LATE = 0.03  # seconds, many times what the small model takes
PLANTED = {
    late_host: "python",
    late_experts: "experts",
    late_attention: "attention",
    late_reads: "expert_wait",
    late_layers: "dense_wait",
}


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_time_that_is_planted_shows_in_its_own_row(byte_model, backend, plant, monkeypatch):
    """Work of the host is Python, products and waits are not, whatever part they are in."""
    options = {"dense_kernel": "native"} if backend == "numpy" else {"device": "cpu"}
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    try:
        cpu.load_cpu_kernels()
    except ResourceError as error:
        pytest.skip(str(error))
    if plant is late_reads:
        options["expert_cache"] = 0
    if plant is late_layers:
        plan = engine_module.plan_memory
        monkeypatch.setattr(engine_module, "plan_memory", lambda *rest: replace(plan(*rest), resident=()))
    with k3mlx.load(byte_model, backend=backend, **options) as engine:
        run_trial(engine, [1, 2, 3], 2)  # warm
        plant(engine, monkeypatch)
        found = []
        while "" not in found and len(found) < 6:  # a busy machine disturbs one or two
            found.append(misplaced(run_trial(engine, [1, 2, 3, 4], 3), PLANTED[plant], backend))
    assert "" in found, found


def misplaced(trial, row, backend):
    """What is wrong with the split of a decode step whose layers were late in `row`; nothing if it is right."""
    parts = split(trial.decode_seconds, trial.decode)
    assert sum(parts[part] for part in SPLIT) == pytest.approx(trial.decode_seconds, rel=1e-6)
    limit = parts[row] / 2
    if parts[row] < 2.5 * LATE:  # in three layers at least
        return f"{row} has {parts[row]:.3f} s"
    if row == "python":
        return ""
    joint = {row, "head"} if backend == "mlx" and row == "attention" else {row}  # an evaluation of its own
    wrong = [part for part in (*SPLIT, "python") if part not in joint and parts[part] > limit]
    return f"{', '.join(wrong)} too: {parts}" if wrong else ""


def test_random_ids_are_the_same_in_each_run():
    assert random_ids(100, 5)(3) == random_ids(100, 5)(3)
    assert set(np.concatenate([random_ids(3, 50)(n) for n in range(2)])) == {0, 1, 2}
