"""One measurement in several fresh processes, one after the other, and their results as one.

What a process happens to get (its place in memory, threads, the clock of that moment) all its repeats share, so only
several processes show how much it matters. Owns starting them and joining what they wrote. Only one of them is there at
a time, and this process opens no model: memory is governed in each as in a run of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from k3mlx.errors import K3Error

from .compare import differences
from .result import figures_as_dict, figures_of, joined, read_result
from .steady import Steadiness, judge


def run_processes(command: Sequence[str], count: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The results of `count` processes of the command, which is given a file to write its result to.

    Raises SystemExit with the status of a process that fails, which has said why; K3Error for one that was killed.
    """
    results = []
    with TemporaryDirectory(prefix="k3mlx-bench-") as folder:
        for number in range(1, count + 1):
            tell(f"process {number} of {count}")
            file = str(Path(folder) / f"{number}.json")
            done = subprocess.run(
                [*command, file], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
            )
            if done.returncode < 0:
                raise K3Error(
                    f"process {number} of {count} was ended by signal {-done.returncode}, expected a result;"
                    " a smaller --memory may help"
                )
            if done.returncode:
                sys.exit(done.returncode)
            results.append(read_result(file))
    return results


def join(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of the whole model from those of several processes: facts of the first, repeats of all.

    `processes` holds what each ran on, its peak of memory and its verdict; `differences` what is not as in the first.
    """
    trials = [trial for result in results for trial in result["trials"]]
    return {
        **results[0],
        "trials": trials,
        "peak_memory_bytes": max(result["peak_memory_bytes"] for result in results),
        "processes": [
            {name: result[name] for name in ("runs_on", "peak_memory_bytes", "steady")} for result in results
        ],
        "differences": [
            f"process {number}, the other is process 1: {line}"
            for number, result in enumerate(results[1:], 2)
            for line in differences(result, results[0])
        ],
        "figures": figures_as_dict(joined([figures_of(result, "a process") for result in results])),
        "steady": _judge(results).as_dict(),
    }


def _judge(results: Sequence[dict[str, Any]]) -> Steadiness:
    """All repeats as one series, and those of each process; others: the largest share in any process."""
    shares = [result["steady"]["others"] for result in results]
    others = None if None in shares else max(shares)
    whole = judge(_seconds([trial for result in results for trial in result["trials"]]), others)
    own = [
        f"process {number}: {why}"
        for number, result in enumerate(results, 1)
        for why in judge(_seconds(result["trials"]), None).reasons
    ]
    return Steadiness((*whole.reasons, *own), whole.others)


def _seconds(trials: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    found = {"prompt": [trial["prompt_seconds"] for trial in trials]}
    if trials[0]["step_seconds"]:
        found["decode"] = [sum(trial["step_seconds"]) for trial in trials]
    return found
