"""Repeats of the whole model, and the figures made of them."""

import copy

import numpy as np
import pytest

import k3mlx
from k3mlx.bench.figures import BESIDE, SPLIT, figures_of_trials, split
from k3mlx.bench.whole import random_ids, run_trial, run_trials, text_ids
from k3mlx.errors import UsageError


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
    report["experts"] |= {"read_seconds": 5.0, "wait_seconds": 2.0}
    report["seconds"] = dict.fromkeys(report["seconds"], 1.0) | {"expert_wait": 2.0}
    report["runtime"]["evaluation_seconds"] = 4.0
    parts = split(10.0, report)
    assert parts["hidden"] == 3.0
    assert parts["python"] == 8.0 - 4.0 - 2.0
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


def test_host_work_is_told_on_mlx(byte_model):
    pytest.importorskip("mlx.core")
    with k3mlx.load(byte_model, backend="mlx", device="cpu") as engine:
        trial = run_trial(engine, [1, 2, 3, 4, 5, 6], 4)
    figures = figures_of_trials([trial], 4)
    assert figures["decode_router"].high == 0  # evaluated with attention
    assert 0 < figures["decode_python"].median < 1e3 * trial.decode_seconds / 2
    assert set(BESIDE) == {"hidden", "python"}


def test_random_ids_are_the_same_in_each_run():
    assert random_ids(100, 5)(3) == random_ids(100, 5)(3)
    assert set(np.concatenate([random_ids(3, 50)(n) for n in range(2)])) == {0, 1, 2}
