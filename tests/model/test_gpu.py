"""The engine on a GPU of MLX, dense parts there, experts by the C kernels, on CPU streams or on it too; kernels on and
off.

Skipped, saying so, where mlx has no GPU. `K3MLX_TEST_GPU=1` makes that a failure: the command for a machine with one is
`K3MLX_TEST_GPU=1 python -m pytest tests/model/test_gpu.py`.
"""

import json
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

import k3mlx
from k3mlx.devices import gpu_kind
from tests.model.conversations import greedy_answers
from tests.model.faulty_run import PROMPT
from tests.model.test_reference import check, check_decoding, check_state, golden_folder
from tests.paths import GOLDEN_RUN, ROOT, needs_golden
from tests.tiny import random_config, write_random_model

__all__ = ["golden_folder"]  # a fixture, used by name
EXPERTS = pytest.mark.parametrize(
    "experts",
    [{"experts_kernel": "native"}, {"experts_kernel": "stream"}, {"experts_device": "gpu"}],
    ids=["native", "stream", "gpu"],
)
SEEDS = range(6)


@pytest.fixture(autouse=True, scope="module")  # before any other of the module is made
def gpu():
    kind = gpu_kind(mx)
    if kind is None:
        reason = f"mlx {mx.__version__} has neither a Metal nor a CUDA device here"
        (pytest.fail if os.environ.get("K3MLX_TEST_GPU") == "1" else pytest.skip)(reason)
    return kind


def on_gpu(folder=None, **options):
    return k3mlx.load(folder, backend="mlx", device="gpu", **options)


def switch_off_kernels(engine):
    engine.backend.room.kernels.disable_all("switched off for a comparison")


@needs_golden
@EXPERTS
def test_golden_logits_and_states(golden_folder, experts):
    captured = np.load(GOLDEN_RUN / "captures.npz")["logits"].ravel()
    with (
        k3mlx.load(golden_folder, backend="numpy", dtype="float64") as reference,
        k3mlx.load(golden_folder, backend="numpy", dtype="float32") as narrow,
        on_gpu(golden_folder, dtype="float32", **experts) as engine,
    ):
        sessions = [each.session() for each in (engine, narrow, reference)]
        for session in sessions:
            session.feed(range(1, 9))
        logits, _, expected = (session.feed([9]) for session in sessions)
        check("logits against the captures", logits, captured, 3e-4)
        check("logits against float64", logits, expected, 1e-4)
        check_state("golden:", engine, sessions[0], sessions[2], 1e-4)
        check_decoding(*sessions, range(10, 30))


@EXPERTS
@pytest.mark.parametrize("seed", SEEDS)
def test_random_models(tmp_path, seed, experts):
    rng = np.random.default_rng(1000 + seed)
    form = "mxfp4" if seed % 2 else "plain"
    folder = write_random_model(tmp_path, random_config(rng, experts=form), rng, experts=form, dtype="F32")
    with (
        k3mlx.load(folder, backend="numpy", dtype="float64") as reference,
        on_gpu(folder, dtype="float32", **experts) as engine,
    ):
        ids = rng.integers(0, engine.config.vocab_size, 80).tolist()
        oracle, session = reference.session(), engine.session()
        rows = session.feed(ids[:60], all_logits=True)
        check("prompt", rows, oracle.feed(ids[:60], all_logits=True), 1e-4)
        for id in ids[60:]:
            check(f"step {len(oracle)}", session.feed([id]), oracle.feed([id]), 1e-4)
        check_state("at the end:", engine, session, oracle, 1e-4)


@pytest.fixture(scope="module")
def answers_of_numpy():
    with k3mlx.load(backend="numpy", dtype="float32") as engine:
        return greedy_answers(engine)


@EXPERTS
@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conversations_are_those_of_numpy(answers_of_numpy, experts, kernels, dtype):
    with on_gpu(dtype=dtype, **experts) as engine:
        if kernels == "off":
            switch_off_kernels(engine)
        assert greedy_answers(engine) == answers_of_numpy
        rows = {row["part"]: row for row in engine.report()["parts"]}
    assert not any(row["failures"] for row in rows.values()), rows
    assert (rows["kda"]["fallbacks"] > 0) is (kernels == "off"), rows["kda"]
    assert len(answers_of_numpy) >= 36


@pytest.fixture(scope="module")
def faulty_folder(tmp_path_factory):
    rng = np.random.default_rng(77)
    config = random_config(rng, num_hidden_layers=5, kda_head_dim=32)
    return write_random_model(tmp_path_factory.mktemp("faulty"), config, rng)


def faulty_run(folder, how, step):
    command = [sys.executable, "-m", "tests.model.faulty_run", str(folder), "gpu", how, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("step", range(1, 11))
def test_a_kernel_text_that_does_not_compile(faulty_folder, step):
    """The run goes on with plain operations, says so once, and gives the ids of a run without the kernels."""
    undisturbed, _ = faulty_run(faulty_folder, "off", 0)
    result, said = faulty_run(faulty_folder, "compile", step)
    assert result["ids"] == undisturbed["ids"]
    assert result["fed"] == PROMPT + undisturbed["ids"]
    rows = {row["part"]: row for row in result["parts"]}
    assert {name: row["failures"] for name, row in rows.items() if row["failures"]} == {"kda": 1}
    assert rows["kda"]["fallbacks"] > 0
    assert len([line for line in said.splitlines() if "done again" in line]) == 1, said
