"""Sessions on the MLX backend: interleaved, restored, saved, called from other threads; memory over a long run."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest

import k3mlx
from k3mlx.engine import Cancelled
from k3mlx.errors import K3Error, ResourceError, UsageError
from tests.paths import ROOT
from tests.tiny import random_config, write_random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(31)
    return write_random_model(tmp_path_factory.mktemp("mlx"), random_config(rng, num_hidden_layers=5), rng)


@pytest.fixture
def engine(folder):
    with k3mlx.load(folder, backend="mlx", device="cpu") as engine:
        yield engine


def greedy(session, prompt, count):
    logits, ids = session.feed(prompt), []
    for _ in range(count):
        ids.append(int(np.argmax(logits)))
        logits = session.feed(ids[-1:])
    return ids, logits


def test_interleaved_sessions_give_what_each_gives_alone(engine):
    prompts = [3, 1, 4, 1, 5], [9, 2, 6]
    alone = [greedy(engine.session(), prompt, 300) for prompt in prompts]
    sessions = [engine.session() for _ in prompts]
    logits = [session.feed(prompt) for session, prompt in zip(sessions, prompts, strict=True)]
    ids = [[], []]
    for _ in range(300):
        for number, session in enumerate(sessions):
            ids[number].append(int(np.argmax(logits[number])))
            logits[number] = session.feed(ids[number][-1:])
    for number, (expected, last) in enumerate(alone):
        assert ids[number] == expected
        np.testing.assert_array_equal(logits[number], last)


def test_a_state_can_be_continued_more_than_once(engine):
    session = engine.session()
    session.feed([1, 2, 3, 4])
    point = session.snapshot()
    first = session.feed([5, 6])
    session.restore(point)
    session.feed([7, 8, 9])
    session.restore(point)
    np.testing.assert_array_equal(session.feed([5, 6]), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_session_goes_on(folder, tmp_path, dtype):
    with k3mlx.load(folder, backend="mlx", device="cpu", dtype=dtype) as engine:
        session = engine.session()
        session.feed([1, 2, 3, 4])
        session.save(tmp_path / "s.safetensors")
        again = engine.load_session(tmp_path / "s.safetensors")
        assert again.ids == [1, 2, 3, 4]
        np.testing.assert_array_equal(again.feed([5]), session.feed([5]))
    with (
        k3mlx.load(folder, backend="numpy") as other,
        pytest.raises(UsageError, match="another model, backend"),
    ):
        other.load_session(tmp_path / "s.safetensors")


def test_sessions_may_be_fed_from_any_thread(engine):
    expected, _ = greedy(engine.session(), [1, 2, 3], 20)
    results = [None] * 3

    def work(number):
        results[number] = greedy(engine.session(), [1, 2, 3], 20)[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [expected] * 3


def test_expert_cache_and_streams_change_no_bit(folder):
    prompt = list(range(1, 30))
    options = {"backend": "mlx", "device": "cpu", "experts_kernel": "stream"}
    with k3mlx.load(folder, **options) as engine:
        expected, last = greedy(engine.session(), prompt, 10)
    for threads, cache in ((3, "auto"), (2, 0), (1, 0)):
        with k3mlx.load(folder, expert_cache=cache, cpu_threads=threads, **options) as engine:
            ids, logits = greedy(engine.session(), prompt, 10)
            row = next(row for row in engine.report()["parts"] if row["part"] == "experts")
        assert row["kernel"] == f"mlx on {threads} stream{'s' if threads > 1 else ''}"
        assert ids == expected
        np.testing.assert_array_equal(logits, last)


def test_errors_leave_the_session_as_it_was(engine):
    session = engine.session()
    session.feed([1, 2])
    with pytest.raises(Cancelled):
        session.feed([3], should_stop=lambda: True)
    assert session.ids == [1, 2]
    other = engine.session()
    other.feed([1, 2])
    np.testing.assert_array_equal(session.feed([3]), other.feed([3]))


def test_damaged_weights_are_named(tmp_path):
    from k3mlx.checkpoint.snapshot import Checkpoint

    rng = np.random.default_rng(31)
    write_random_model(tmp_path, random_config(rng, num_hidden_layers=5), rng)
    with Checkpoint.open(tmp_path) as checkpoint:
        info = checkpoint.tensors["model.layers.2.post_attention_layernorm.weight"]
    with open(info.path, "r+b") as file:
        file.seek(info.offset)
        file.write(np.full(3, np.nan, np.float32).tobytes())
    where = r"layers\.2\.mlp_norm|router score is NaN"
    with k3mlx.load(tmp_path, backend="mlx", device="cpu") as engine, pytest.raises(K3Error, match=where):
        engine.session().feed([1, 2, 3])


def test_scale_byte_of_nan_is_refused(tmp_path):
    from k3mlx.checkpoint.snapshot import Checkpoint

    rng = np.random.default_rng(31)
    write_random_model(tmp_path, random_config(rng, num_hidden_layers=5), rng)
    with Checkpoint.open(tmp_path) as checkpoint:
        infos = [i for n, i in checkpoint.tensors.items() if n.endswith("w1.weight_scale")]
    with open(infos[0].path, "r+b") as file:
        for info in infos:
            file.seek(info.offset)
            file.write(b"\xff")
    with (
        k3mlx.load(tmp_path, backend="mlx", device="cpu") as engine,
        pytest.raises(K3Error, match="scale byte 255"),
    ):
        engine.session().feed([1, 2, 3])


def test_refused_options(folder):
    with pytest.raises(UsageError, match="expected bfloat16 or float32 on the mlx backend"):
        k3mlx.load(folder, backend="mlx", device="cpu", dtype="float64")
    with pytest.raises(ResourceError, match="this run has none"):
        k3mlx.load(folder, backend="mlx", device="cpu", experts_device="gpu")


@pytest.mark.slow
def test_memory_is_flat_over_5000_steps(folder):
    """In a process of its own: pytest's grows by itself."""
    command = [sys.executable, "-m", "tests.model.long_run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(measured)
    for name, before in measured["500"].items():
        assert abs(measured["5000"][name] - before) <= 0.02 * before, name
