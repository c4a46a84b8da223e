"""Findings about kernels and about the trial run, by made-up reports, and one run of each for real."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from k3mlx.devices import Choice
from k3mlx.doctor import kernels, trial
from k3mlx.doctor.findings import OK, WARNING
from k3mlx.doctor.kernels import (
    CpuKernels,
    check_cpu_kernels,
    check_gpu_kernels,
    check_selftest,
    look_at_cpu_kernels,
)
from k3mlx.errors import ResourceError
from k3mlx.selftest import Report

from .facts import C_KERNELS, PART, TRIAL, selftest_report


def test_the_instruction_set_is_named() -> None:
    line = check_cpu_kernels(C_KERNELS)
    assert line.level == OK
    assert line.text == "C kernels, avx2, 8 threads: 23 checks passed"
    assert "avx2, portable" in line.details[0]


def test_without_a_compiler_it_says_what_is_missing_and_what_that_costs() -> None:
    line = check_cpu_kernels(
        CpuKernels(missing="not built; build it", no_compiler="no C compiler found (cc)")
    )
    assert line.level == WARNING
    assert "no C compiler found (cc)" in line.text
    assert "30 times slower" in line.text
    assert "install a C compiler" in line.remedy


def test_with_a_compiler_the_remedy_is_to_build() -> None:
    line = check_cpu_kernels(CpuKernels(missing="they are not built (x does not exist); run the script"))
    assert line.text.startswith("they are not built (x does not exist): the numpy backend")
    assert line.remedy == "run the script"
    alone = check_cpu_kernels(CpuKernels(missing="CPU kernels for 'neon' do not run here"))
    assert "neon" in alone.text
    assert "K3_CPU_ISA" in alone.remedy


def test_c_kernels_that_compute_wrong_are_not_used() -> None:
    line = check_cpu_kernels(replace(C_KERNELS, wrong=("mxfp4 by 3.0e-01",)))
    assert line.level == WARNING
    assert "1 of 23 checks failed" in line.text
    assert line.details == ("mxfp4 by 3.0e-01",)


def test_looking_at_kernels_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ResourceError("not built; build")

    monkeypatch.setattr("k3mlx.kernels.cpu.load_cpu_kernels", absent)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert look_at_cpu_kernels() == CpuKernels(
        missing="not built; build",
        no_compiler="CC is 'no-such-compiler', which is not an executable on the PATH",
    )
    monkeypatch.delenv("CC")
    if shutil.which("cc"):
        assert look_at_cpu_kernels().no_compiler == ""


def test_the_remembered_verdict() -> None:
    assert check_gpu_kernels("cpu", None).level == OK
    unknown = check_gpu_kernels("metal", None)
    assert unknown.level == WARNING
    assert unknown.remedy == "k3mlx doctor --selftest"
    good = check_gpu_kernels("metal", selftest_report("metal"))
    assert good.level == OK
    assert "1 checks on metal passed" in good.text
    bad = check_gpu_kernels("metal", selftest_report("metal", ("kda_step", "metal")))
    assert bad.level == WARNING
    assert "kda_step: failed its self-test" in bad.text


def test_a_self_test_that_has_just_run() -> None:
    assert check_selftest(selftest_report("metal")).level == OK
    switched_off = check_selftest(selftest_report("metal", ("kda_step", "metal"), ("cpu_kernels", "cpu")))
    assert switched_off.level == WARNING
    assert "2 of 4 checks failed" in switched_off.text
    on_mlx = check_selftest(selftest_report("metal", ("kda_step", "mlx-cpu")))  # nothing is behind that
    assert on_mlx.level == "fatal"


@pytest.mark.parametrize(
    ("choice", "device"),
    [
        (Choice("numpy", "cpu"), "numpy"),
        (Choice("mlx", "cpu"), "mlx-cpu"),
        (Choice("mlx", "metal"), "metal"),
    ],
)
def test_which_self_test_is_run(choice: Choice, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Callable[[str], Report] = selftest_report
    monkeypatch.setattr("k3mlx.selftest.selftest_and_remember", asked)
    assert kernels.run_selftest(choice).device == device


def test_a_trial_with_fallbacks_is_a_warning_with_the_table() -> None:
    (line,) = trial.check_trial(TRIAL)
    assert line.level == OK
    report = {**(TRIAL.report or {}), "parts": [{**PART, "fallbacks": 2}]}
    (line,) = trial.check_trial(replace(TRIAL, report=report, notes=("kda_step: switched off",)))
    assert line.level == WARNING
    assert "in kda" in line.text
    assert line.data["parts"][0]["fallbacks"] == 2
    assert line.details == ("kda_step: switched off",)


def test_a_trial_for_real() -> None:
    done = trial.run_trial("numpy", "cpu")
    assert (done.code, done.text) == (0, trial.ANSWER)
    (line,) = trial.check_trial(done)
    assert line.level == OK
    assert {"kda", "mla", "experts", "head"} <= {part["part"] for part in line.data["parts"]}


def test_a_trial_that_ends_badly_or_never() -> None:
    refused = trial.run_trial("numpy", "gpu")
    assert refused.code == 4
    assert "--device gpu" in refused.error
    (line,) = trial.check_trial(trial.run_trial("numpy", "cpu", deadline=0.01))
    assert "did not end: no answer after 0.01 s" in line.text
