"""Several processes of one machine as ranks: the same answers as one, each its share of the experts, no hang."""

import json
import os
import random
import shutil
import signal
import time
from importlib.util import find_spec

import numpy as np
import pytest

import k3mlx
from k3mlx.config import load_config
from k3mlx.experts.warm import residency_path
from k3mlx.planning.ranks import traffic
from tests.model.conversations import PROMPTS, greedy_answers
from tests.tiny import random_config, write_random_model

from .launch import Ranks

pytestmark = pytest.mark.skipif(
    find_spec("mlx") is None, reason="mlx is not installed: pip install 'k3mlx[mlx]'"
)
SIZES = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
END_SECONDS = 30  # in which a loss must have ended every rank


@pytest.fixture(scope="module")
def answers():
    with k3mlx.load(backend="mlx", device="cpu", dtype="float32") as engine:
        return json.loads(json.dumps(greedy_answers(engine, PROMPTS[::6])))


@pytest.mark.slow
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_conversations_are_those_of_one_process(tmp_path, answers, size, dense):
    with Ranks(tmp_path, size, "conversations", dense=dense) as ranks:
        result = ranks.result()
    assert result["answers"] == answers
    reports = result["report"]["ranks"]
    assert [row["rank"] for row in reports] == list(range(size))
    read = [row["experts"]["bytes_read"] for row in reports]
    for count in read:
        assert count / sum(read) == pytest.approx(1 / size, abs=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    rng = np.random.default_rng(12)
    config = random_config(rng, num_hidden_layers=5)
    folder = write_random_model(tmp_path_factory.mktemp("ranks"), config, rng)
    ids = rng.integers(0, load_config(folder).vocab_size, 60).tolist()
    return folder, ids, config


def only_own_are_read(tmp_path, size):
    """Each rank has read experts, its own and no others, all ranks into memory of one kind."""
    noted = [json.loads((tmp_path / f"out.reads.{rank}").read_text()) for rank in range(size)]
    for rank, read in enumerate(row["read"] for row in noted):
        assert read, rank
        assert all((expert + layer) % size == rank for layer, expert in read), (rank, read)
    assert len({row["mlx"] for row in noted}) == 1, noted


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_logits_are_within_1e_4_of_float64_and_traffic_is_as_on_paper(tmp_path, model, size, dense):
    folder, ids, _ = model
    with Ranks(tmp_path, size, "logits", json.dumps(ids), 17, folders={None: folder}, dense=dense) as ranks:
        report = ranks.result()["report"]
    got = np.load(tmp_path / "out.npy")
    with k3mlx.load(folder, backend="numpy", dtype="float64") as engine:
        session = engine.session()
        expected = [session.feed(ids[:17]), session.feed(ids[17:-20])]
        expected += [session.feed([id]) for id in ids[-20:]]
        config = engine.config
    np.testing.assert_allclose(got, np.array(expected), rtol=0, atol=1e-4)
    only_own_are_read(tmp_path, size)
    paper = traffic(config, size, dense)
    for row in report["ranks"]:
        assert row["traffic"]["messages"] == 22 * paper.messages
        sent = 4 * (len(ids) * paper.per_token + 22 * paper.per_pass)
        assert row["traffic"]["bytes_sent"] == row["traffic"]["bytes_received"] == (size - 1) * sent


def test_ranks_do_not_read_what_one_process_had_in_memory(tmp_path, model, monkeypatch):
    folder, ids, _ = model
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with k3mlx.load(folder, backend="mlx", device="cpu", dtype="float32", warm_start="on") as engine:
        engine.session().feed(ids)
        slots = engine.config.num_experts_per_token  # of a rank of this test
    kept = json.loads(residency_path(folder).read_text())
    assert {(expert + layer) % 2 for layer, expert in kept[:slots]} == {0, 1}
    with Ranks(tmp_path, 2, "logits", json.dumps(ids), 17, folders={None: folder}) as ranks:
        experts = [row["experts"] for row in ranks.result()["report"]["ranks"]]
    only_own_are_read(tmp_path, 2)
    assert [row["warm_bytes"] for row in experts] == [0, 0]


def ends(ranks, *expected):
    """All ranks that still run end within the time, none of them well; one says each of `expected`."""
    started = time.monotonic()
    done = ranks.finish()
    assert time.monotonic() - started < END_SECONDS
    assert all(code for code, _ in done), done
    said = "\n".join(errors for _, errors in done)
    for words in expected:
        assert words in said, said
    assert "Traceback" not in said, said


@pytest.mark.parametrize(("victim", "step"), [(0, 3), (1, 1), (1, 7)])
def test_a_rank_that_is_killed_ends_the_others(tmp_path, model, victim, step):
    with Ranks(tmp_path, 2, "decode", 100_000, folders={None: model[0]}) as ranks:
        ranks.wait_for_step(step)
        ranks.processes[victim].send_signal(signal.SIGKILL)
        ends(ranks, f"rank {victim} is lost")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_is_killed_at_a_random_moment(tmp_path, model, seed):
    choose = random.Random(seed)
    with Ranks(tmp_path, 3, "decode", 100_000, folders={None: model[0]}) as ranks:
        if seed % 3:
            ranks.wait_for_step(1)
        time.sleep(choose.random())
        ranks.processes[choose.randrange(3)].send_signal(signal.SIGKILL)
        ends(ranks)


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_others(tmp_path, model):
    with Ranks(tmp_path, 2, "decode", 100_000, folders={None: model[0]}) as ranks:
        ranks.wait_for_step(2)
        ranks.processes[1].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert ranks.processes[0].wait(END_SECONDS) == 1
        assert time.monotonic() - started < END_SECONDS
        ranks.processes[1].send_signal(signal.SIGCONT)
        ends(ranks, "rank 1 is lost: nothing heard of it")


def test_a_rank_with_another_checkpoint(tmp_path, model):
    rng = np.random.default_rng(13)
    other = write_random_model(tmp_path / "other", model[2], rng)
    with Ranks(tmp_path, 2, "decode", 10, folders={None: model[0], 1: other}) as ranks:
        ends(ranks, "rank 1 has experts", "give every rank the same model")


def test_a_rank_with_a_missing_shard(tmp_path, model):
    folder = tmp_path / "cut"
    shutil.copytree(model[0], folder)
    shard = max(folder.glob("*.safetensors"), key=os.path.getsize)
    shard.unlink()
    with Ranks(tmp_path, 2, "decode", 10, folders={None: model[0], 1: folder}) as ranks:
        ends(ranks, shard.name, "rank 1")


def test_a_warm_start_that_is_asked_for(tmp_path, model):
    with Ranks(tmp_path, 2, "decode", 10, folders={None: model[0]}, warm_start="on") as ranks:
        ends(ranks, "warm_start is on, which several ranks cannot have")


def test_a_rank_that_loses_its_disk(tmp_path, model):
    folder = tmp_path / "lost"
    shutil.copytree(model[0], folder)
    with Ranks(tmp_path, 2, "decode", 100_000, folders={None: model[0], 1: folder}) as ranks:
        ranks.wait_for_step(1)
        for shard in folder.glob("*.safetensors"):
            os.truncate(shard, 100)
        ends(ranks, "rank 1")
