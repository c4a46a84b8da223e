"""Steps that fail, each in a fresh process: no token lost or doubled, one failure and the fallbacks in the report."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.model.faulty_run import PROMPT
from tests.paths import ROOT
from tests.tiny import random_config, write_random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(77)
    return write_random_model(tmp_path_factory.mktemp("faulty"), random_config(rng, num_hidden_layers=5), rng)


def run(folder, where, how, step=0):
    command = [sys.executable, "-m", "tests.model.faulty_run", str(folder), where, how, str(step)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


@pytest.fixture(scope="module")
def undisturbed(folder):
    done = run(folder, "kernel", "none")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(done, undisturbed, part):
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ids"] == undisturbed["ids"]
    assert result["fed"] == PROMPT + undisturbed["ids"]
    for name, total in undisturbed["state"].items():
        assert result["state"][name] == pytest.approx(total, rel=1e-5), name
    parts = {row["part"]: row for row in result["parts"]}
    assert {name: row["failures"] for name, row in parts.items() if row["failures"]} == {part: 1}
    assert parts[part]["fallbacks"] > 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("k3mlx:")]
    assert len(lines) == 1, done.stderr
    assert "done again" in lines[0]
    return parts


@pytest.mark.parametrize("how", ["build", "worker"])
@pytest.mark.parametrize("step", range(1, 11))
def test_kernel_fails(folder, undisturbed, how, step):
    parts = check(run(folder, "kernel", how, step), undisturbed, "kda")
    assert parts["kda"]["kernel"] == "mlx, kda_prefill"


@pytest.mark.parametrize("how", ["build", "worker"])
@pytest.mark.parametrize("step", [1, 4, 10])
def test_experts_fail(folder, undisturbed, how, step):
    parts = check(run(folder, "experts", how, step), undisturbed, "experts")
    assert parts["experts"]["kernel"] == "numpy"


def test_an_evaluation_that_never_returns_ends_the_process(folder, undisturbed):
    done = run(folder, "kernel", "never", 4)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    found = re.search(r"layer \d+: .* \(kernels kda_step\) did not return within .* s; .* are in (\S+)", line)
    assert found, done.stderr
    path = Path(found[1])
    assert json.loads(path.read_text()) == PROMPT + undisturbed["ids"][:2]
    path.unlink()
