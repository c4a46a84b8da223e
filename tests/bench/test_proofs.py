"""Slow proofs of `k3mlx bench`: two runs of one model are alike, a slower one is told, so is a neighbour.

Of k3-nano, or of the folder in `K3MLX_BENCH_MODEL` with the options in `K3MLX_BENCH_OPTIONS`. A busy machine is no
place for them: the second run would be another one's.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager

import pytest

import k3mlx
from k3mlx.bench.run import Run
from k3mlx.bench.steady import OTHERS_MAX
from k3mlx.bench.whole import random_ids

pytestmark = pytest.mark.slow
MODEL = os.environ.get("K3MLX_BENCH_MODEL")
OPTIONS = shlex.split(os.environ.get("K3MLX_BENCH_OPTIONS", "-p 256 -g 64"))


def bench(*options):
    """What a run of the command printed."""
    model = [] if MODEL is None else ["--model", MODEL]
    done = subprocess.run(
        [sys.executable, "-m", "k3mlx", "bench", *model, *OPTIONS, *options],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    print(done.stdout)
    return done.stdout


def rates(printed):
    """Cells of the rows of both rates in a printed comparison: this, other, ratio, from, to; and the verdict."""
    found = re.findall(r"^(?:prompt|decode)_rate, tokens/s +(.*)$", printed, re.M)
    assert len(found) == 2, printed
    return [([float(cell) for cell in row.split()[:5]], " ".join(row.split()[5:])) for row in found]


def test_two_runs_have_a_ratio_of_1_within_their_spread(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    bench("--json", str(first))
    printed = bench("--json", str(second), "--compare", str(first))
    steady = [json.loads(file.read_bytes())["steady"]["steady"] for file in (first, second)]
    for (this, other, ratio, low, high), verdict in rates(printed):
        assert low <= 1 <= high
        assert verdict == ""
        assert ratio == pytest.approx(this / other, rel=0.01)
        if all(steady):  # then the spread is no excuse
            assert abs(ratio - 1) <= 0.10
    assert not [line for line in printed.splitlines() if line.startswith(("options: ", "machine: "))]


@pytest.mark.skipif(MODEL is not None, reason="float64 would need twice the memory of a slice")
def test_a_slower_run_is_told(tmp_path):
    first = tmp_path / "a.json"
    bench("--backend", "numpy", "--json", str(first))
    printed = bench("--backend", "numpy", "--dtype", "float64", "--compare", str(first))
    for (_, _, ratio, _, high), verdict in rates(printed):
        assert ratio < 0.85
        assert high < 1
        assert verdict == "differs"


@contextmanager
def neighbours(count):
    """As many processes that do nothing but compute."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield burners
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_a_load_in_half_of_the_repeats_is_told(tmp_path):
    """Two neighbours for each processor: by their share, and by the repeats that they slow down."""
    repeats, done = 6, []
    with k3mlx.load(MODEL, backend="numpy") as engine, neighbours(0) as burners:
        ids = random_ids(engine.config.vocab_size, 96 if MODEL is None else 12)
        run = Run({})
        run.engine(engine)

        def tell(trial):
            done.append(trial)
            if len(done) == repeats // 2:
                loop = [sys.executable, "-c", "while True: pass"]
                burners.extend(subprocess.Popen(loop) for _ in range(2 * (os.cpu_count() or 1)))

        run.whole(engine, ids, 64 if MODEL is None else 8, repeats, tell)
        verdict = run.result()["steady"]
    print(verdict)
    assert not verdict["steady"]
    assert verdict["others"] > OTHERS_MAX
    assert any("repeats differ by" in reason for reason in verdict["reasons"]), verdict
    assert any("other processes used" in reason for reason in verdict["reasons"]), verdict
