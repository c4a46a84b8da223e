"""Several processes: one at a time, what ends them early, and their results as one."""

import json
import sys

import pytest

from k3mlx.bench.processes import join, run_processes
from k3mlx.bench.result import FORM, Figure, figures_as_dict, figures_of
from k3mlx.errors import K3Error

ALONE = """
import json, os, pathlib, sys, time
lock, file = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
time.sleep(0.2)
print("stray words")
file.write_text(json.dumps({"k3mlx_bench": 1, "pid": os.getpid()}))
lock.unlink()
"""


def test_processes_are_fresh_and_there_one_at_a_time(tmp_path, capfd):
    told = []
    results = run_processes([sys.executable, "-c", ALONE, str(tmp_path / "lock")], 3, told.append)
    assert len({result["pid"] for result in results}) == 3
    assert told == [f"process {n} of 3" for n in (1, 2, 3)]
    assert capfd.readouterr().out == ""


def test_a_process_that_fails_ends_all_with_its_status():
    told = []
    with pytest.raises(SystemExit) as ended:
        run_processes([sys.executable, "-c", "import sys; sys.exit(4)"], 3, told.append)
    assert ended.value.code == 4
    assert len(told) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_a_process_that_is_killed_is_named():
    program = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(K3Error, match="process 1 of 2 was ended by signal 9"):
        run_processes([sys.executable, "-c", program], 2, lambda line: None)


def result(prompts, decodes=(1.0, 1.0, 1.0), others=0.01, peak=10, cache=5):
    """What one process wrote."""
    trials = [
        {"prompt_seconds": prompt, "step_seconds": [step / 2, step / 2] if step else []}
        for prompt, step in zip(prompts, decodes, strict=True)
    ]
    return {
        "k3mlx_bench": FORM,
        "machine": {"chip": "x"},
        "runs_on": {"backend": "numpy", "experts_cache_bytes": cache},
        "figures": figures_as_dict({"prompt_token": Figure("ms", tuple(prompts))}),
        "trials": trials,
        "peak_memory_bytes": peak,
        "steady": {"steady": True, "reasons": [], "others": others},
    }


def test_a_joined_result_has_the_facts_of_one_and_the_repeats_of_all():
    first, second = result((1.0, 1.01, 1.02)), result((1.03, 1.0, 1.01), others=0.02, peak=12)
    whole = json.loads(json.dumps(join([first, second])))
    assert figures_of(whole, "")["prompt_token"] == Figure("ms", (1.0, 1.01, 1.02, 1.03, 1.0, 1.01), (3, 3))
    assert whole["trials"] == first["trials"] + second["trials"]
    assert (whole["machine"], whole["runs_on"]) == (first["machine"], first["runs_on"])
    assert whole["peak_memory_bytes"] == 12
    assert [one["peak_memory_bytes"] for one in whole["processes"]] == [10, 12]
    assert whole["differences"] == []
    assert whole["steady"]["steady"]
    assert whole["steady"]["others"] == 0.02


def test_a_process_that_runs_otherwise_is_told():
    whole = join([result((1.0, 1.0, 1.0)), result((1.0, 1.0, 1.0), cache=6)])
    assert whole["differences"] == [
        "process 2, the other is process 1: runs_on: experts_cache_bytes is 6, in the other 5"
    ]


EVEN = (1.0, 1.01, 1.0)


@pytest.mark.parametrize(
    ("second", "reasons"),
    [
        (result((1.15, 1.16, 1.15)), ["prompt: repeats differ by 15%", "prompt: 16% slower from the first repeat"]),
        (result(EVEN, decodes=(1.0, 1.2, 1.0)), ["decode: repeats differ by 20%", "process 2: decode: repeats differ"]),
        (result(EVEN, others=0.3), ["other processes used 30% of the processors"]),
    ],
)  # fmt: skip
def test_processes_are_judged_together_and_alone(second, reasons):
    verdict = join([result(EVEN), second])["steady"]
    assert not verdict["steady"]
    assert len(verdict["reasons"]) == len(reasons)
    for found, expected in zip(verdict["reasons"], reasons, strict=True):
        assert found.startswith(expected)


def test_without_decode_steps_and_where_others_are_not_known():
    one = result(EVEN, decodes=(0, 0, 0), others=None)
    assert join([one, one])["steady"] == {**join([one])["steady"], "others": None}
