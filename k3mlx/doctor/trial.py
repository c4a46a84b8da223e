"""A run of the shipped model with the backend and device in question: what runs where, and whether it answers right.

The run is a process of its own, so that neither a crash nor a hang of a driver ends the diagnosis.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .findings import Finding, fatal, ok, warning

PROMPT, ANSWER = 'Copy this: "blue harbor"', "blue harbor"
DEADLINE = 180.0  # seconds; on a new GPU the self-test of the kernels comes first
DOES_NOT_FIT = 4  # the exit code of a run whose device is absent


@dataclass(frozen=True)
class Trial:
    """How the run ended. code: its exit code, None if it did not end. error: its last line on stderr.
    notes: what it said about falling back. report: see `Engine.report`."""

    code: int | None
    error: str = ""
    text: str = ""
    notes: tuple[str, ...] = ()
    report: dict[str, Any] | None = None


def run_trial(backend: str, device: str, deadline: float = DEADLINE) -> Trial:
    """Generate a short answer with k3-nano."""
    command = [
        *(sys.executable, "-m", "k3mlx", "generate", "--backend", backend, "--device", device),
        *("--max-tokens", "64", "--temp", "0", "--json", "-", "--prompt", PROMPT),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace",
            timeout=deadline, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Trial(None, f"no answer after {deadline:g} s")
    lines = done.stderr.strip().splitlines()
    if done.returncode:
        return Trial(done.returncode, lines[-1] if lines else "it said nothing")
    result = json.loads(done.stdout)
    notes = tuple(line.removeprefix("k3mlx: ") for line in lines if line.startswith("k3mlx: "))
    return Trial(0, "", result["text"], notes, result["report"])


def check_trial(trial: Trial) -> Iterator[Finding]:
    """A line about the run; where it went well, with the table of what ran where as `data["parts"]`."""
    again = f"k3mlx generate --verbose --prompt '{PROMPT}' shows it, with the same --backend and --device"
    if trial.code == DOES_NOT_FIT:
        yield fatal("trial-refused", f"the shipped model cannot be run so: {trial.error}", again)
        return
    if trial.code != 0 or trial.report is None:
        ended = "did not end" if trial.code is None else f"ended with status {trial.code}"
        yield fatal("trial", f"a run of the shipped model {ended}: {trial.error}", again)
        return
    parts = trial.report["parts"]
    where = f"{trial.report['backend']} {trial.report['dtype']} on {trial.report['device']}"
    if trial.text != ANSWER:
        text = f"the shipped model answered {trial.text[:60]!r}, expected {ANSWER!r} ({where})"
        yield fatal("trial-answer", text, "k3mlx selftest says what computes wrong", data={"parts": parts})
        return
    faults = [part["part"] for part in parts if part["failures"] or part["fallbacks"]]
    if faults:
        text = f"the shipped model runs, {where}, with failures or fallbacks in {', '.join(faults)}"
        yield warning(
            "trial", text, "k3mlx selftest says which kernel fails", trial.notes, data={"parts": parts}
        )
    else:
        yield ok(
            "trial", f"the shipped model runs and answers right, {where}", trial.notes, data={"parts": parts}
        )
