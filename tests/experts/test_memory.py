"""The memory promise: peak of a whole process within what was asked, for several budgets and both backends.

On a slice with the released widths divided by four: dense weights of 0.5 GB, experts of 0.35 GB. It has enough layers
for those in memory at once to be fewer.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

LAYERS = 6
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="peak memory is read with the resource module"),
]

RUN = """
import json, sys
import k3mlx
folder, backend, memory = sys.argv[1], sys.argv[2], int(sys.argv[3])
try:
    with k3mlx.load(folder, backend=backend, device="cpu", memory=memory, prefill_step_size=64,
                    warm_start="off", lookahead="off") as engine:
        session = engine.session()
        session.feed([n * 37 % 1000 for n in range(150)])
        for n in range(4):
            logits = session.feed([n])
        report = engine.report()
        print(json.dumps([report["peak_memory_bytes"], report["memory"], report["dense"], logits.tolist()]))
except k3mlx.errors.ResourceError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def slice_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slice")
    script = ROOT / "scripts" / "make_slice.py"
    sizes = ["--layers", str(LAYERS), "--experts", "64", "--vocab", "1024", "--width", "4"]
    subprocess.run([sys.executable, str(script), str(folder), *sizes], check=True, timeout=300)
    return folder


def run(folder, backend, memory):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), backend, str(memory)],
        capture_output=True, text=True, timeout=500, check=True, env=os.environ | {"OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_peak_memory_is_within_the_budget_and_the_output_the_same(slice_folder, backend):
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="mlx is not installed")
    refusal = run(slice_folder, backend, 10**8)
    assert "expected at least" in refusal
    least = int(refusal.split("expected at least ")[1].split()[0])
    logits, streamed = [], []
    for memory in (least + (4 << 20), int(least * 1.2), int(least * 1.5), 4 * 10**9):
        peak, plan, dense, last = run(slice_folder, backend, memory)
        print(f"{backend}: {memory / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB, {plan['resident']} layers stay")
        assert peak <= 1.02 * memory
        assert (dense["bytes_read"] > 0) == (plan["resident"] < LAYERS)
        streamed.append(plan["resident"] < LAYERS)
        logits.append(last)
    assert streamed[0]
    assert not streamed[-1]
    assert all(last == logits[0] for last in logits)
