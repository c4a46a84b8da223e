"""Memory while a model is loaded, in a process of its own."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.model.load_run import __name__ as RUN
from tests.paths import ROOT
from tests.tiny import random_config, random_tensors, write_model

MARGIN = 300 << 20


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """Dense weights of about 500 MB in bf16, most of them in embedding and head; small experts."""
    rng = np.random.default_rng(1)
    config = random_config(
        rng, num_hidden_layers=4, hidden_size=2048, vocab_size=40_000, intermediate_size=8192
    )
    return write_model(tmp_path_factory.mktemp("wide"), config, random_tensors(config, rng, dtype="BF16"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process from /proc")
@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float32", 4)])
def test_loading_takes_the_weights_and_one_tensor(wide_folder, dtype, item):
    command = [sys.executable, "-m", RUN, str(wide_folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    took = json.loads(done.stdout)
    print({name: round(value / 1e6) for name, value in took.items()}, "MB")
    assert took["weights"] > 400_000_000 * item / 2
    largest = 40_000 * 2048 * item
    assert took["peak"] - took["before"] <= took["weights"] + largest + MARGIN
