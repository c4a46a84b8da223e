"""The self-test: what it finds on a device with a wrong kernel, its own process, its memory, its command."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from k3mlx import selftest
from k3mlx.cli import selftest as command
from k3mlx.cli.selftest import format_table
from k3mlx.errors import ResourceError
from k3mlx.kernels import KERNELS, Kernels, kernel_text
from k3mlx.kernels.cases import kda_case, route_case
from k3mlx.selftest import Report, Row, gate, kernel_rows

from .emulated import needs_emulator
from .emulator import EmuArray, Emulator, EmulatorMaker, array
from .test_launch import needs_mlx

FEW = [
    kda_case("kda_step", tokens=2, width=32),
    kda_case("kda_prefill", tokens=9, width=32),
    route_case(experts=20, k=4),
]


def numbers(outputs: Sequence[EmuArray]) -> list[np.ndarray]:
    return [output.values() for output in outputs]


def on_emulator(texts: dict[str, tuple[str, str]]) -> Report:
    report = Report("emulator")
    maker = EmulatorMaker(Emulator(checked=False), texts)
    report.rows = kernel_rows(report, maker, FEW, array, numbers)
    return report


@needs_emulator
def test_right_kernels_pass_with_the_default_threads() -> None:
    report = on_emulator({})
    assert report.passed, format_table(report)
    assert report.failed_kernels() == {}
    assert report.threads == {stem: spec.threads for stem, spec in KERNELS.items()}


@needs_emulator
@needs_mlx
def test_a_wrong_constant_disables_that_kernel_alone_and_the_answers_stay_right() -> None:
    import mlx.core as mx

    header, source = kernel_text("kda_step")
    wrong = source.replace("square / float(HEAD_DIM)", "square / float(HEAD_DIM + 1)")
    assert wrong != source
    report = on_emulator({"kda_step": (header, wrong)})
    failed = report.failed_kernels()
    assert list(failed) == ["kda_step"]
    assert "self-test" in failed["kda_step"]
    lines: list[str] = []
    kernels = Kernels(EmulatorMaker(Emulator(), {"kda_step": (header, wrong)}), note=lines.append)
    for stem, reason in failed.items():
        kernels.disable(stem, reason, failed=False)
    case = FEW[0]
    arguments = [a if d is None else mx.array(a) for a, d in zip(case.arguments, case.dtypes, strict=True)]
    checks = case.judge([np.array(o) for o in kernels.kda_step(*arguments)])
    assert all(check.passed for check in checks), checks
    assert len(lines) == 1
    assert "plain operations instead of the kernel: failed its self-test" in lines[0]


@needs_emulator
def test_refused_threadgroups_are_halved_and_remembered() -> None:
    emulator = Emulator(checked=False)

    class Small(EmulatorMaker):
        def build(self, spec):  # type: ignore[no-untyped-def]
            kernel = super().build(spec)

            def call(**keywords):  # type: ignore[no-untyped-def]
                if keywords["threadgroup"][0] > 256:
                    raise ValueError("Thread group size is greater than 256")
                return kernel(**keywords)

            return call

    report = Report("emulator")
    report.rows = kernel_rows(report, Small(emulator), FEW, array, numbers)
    assert report.passed, format_table(report)
    assert (report.threads["kda_step"], report.threads["kda_prefill"], report.threads["route_topk"]) == (
        256,
        256,
        128,
    )


@needs_emulator
def test_another_simd_width_disables_every_kernel() -> None:
    header, source = kernel_text("simd_width")
    report = on_emulator({"simd_width": (header, source.replace("int(threads_per_simdgroup)", "64"))})
    assert report.failed_kernels() == dict.fromkeys(
        KERNELS, "is written for SIMD groups of 32 (the device's are of 64)"
    )


def test_process_that_does_not_answer_fails_every_kernel() -> None:
    late = selftest.selftest("metal", deadline=0.01)
    assert set(late.failed_kernels()) == set(KERNELS)
    assert "no answer after 0.01 s" in next(iter(late.failed_kernels().values()))


def test_each_case_is_told_as_it_begins() -> None:
    """Or the first run on a GPU, which compiles them all, would look like one that hangs."""
    told: list[str] = []
    report = selftest.run_here("mlx-cpu", told.append)
    assert len(told) == len(list(selftest.cases())) > 20
    assert all(sum(row.case.startswith(case.label) for row in report.rows) for case in selftest.cases())
    assert told[0].startswith("kda_step ")
    assert told[0].endswith(" float32 on mlx-cpu")


@pytest.mark.skipif(shutil.which("false") is None, reason="needs the command false")
def test_process_that_dies_fails_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest.sys, "executable", shutil.which("false"))
    dead = selftest.selftest("metal", deadline=60.0)
    assert not dead.passed
    assert "status 1" in next(iter(dead.failed_kernels().values()))


def row(passed: bool) -> Row:
    return Row(
        "kda_step", "plain", "float32", "metal", "relative L2", 1e-7 if passed else np.nan, 2e-6, 0.0, passed
    )


def test_verdict_is_remembered_until_a_text_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = []

    def once(device: str, deadline: float) -> Report:
        runs.append(device)
        return Report(device, [row(len(runs) > 1)], {"kda_step": 256})

    monkeypatch.setattr(selftest, "selftest", once)
    monkeypatch.setattr(selftest, "user_cache", lambda: tmp_path)
    first, again = gate("metal"), gate("metal")
    assert first.disabled.keys() == again.disabled.keys() == {"kda_step"}
    assert (first.remembered, again.remembered, again.threads) == (False, True, {"kda_step": 256})
    monkeypatch.setattr(selftest, "texts_digest", lambda stems: "another text")
    assert gate("metal").disabled == {}
    assert runs == ["metal", "metal"]


def test_failure_to_run_is_not_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(selftest, "selftest", lambda device, deadline: selftest._lost(device, "it hangs"))
    monkeypatch.setattr(selftest, "user_cache", lambda: tmp_path)
    assert set(gate("metal").disabled) == set(KERNELS)
    assert not gate("metal").remembered
    assert not list(tmp_path.iterdir())


def test_command_on_the_cpu_prints_a_table_and_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    code = command.run(parser.parse_args(["--device", "cpu", "--json", "-"]))
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert code == 0, printed.err
    assert found["passed"]
    assert {"kernel", "case", "dtype", "path", "error", "tolerance", "seconds", "passed"} <= set(
        found["rows"][0]
    )
    assert "0 failed" in printed.err.splitlines()[-1]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3mlx.devices.gpu_kind", lambda mx: None)
    with pytest.raises(ResourceError, match="--device gpu"):
        selftest.find_device("gpu")


def test_table_says_what_failed() -> None:
    table = format_table(Report("metal", [row(True), row(False)], {"kda_step": 256}, ["a note"]))
    assert table.splitlines()[-1] == "metal: 2 checks, 1 failed"
    assert "FAILED" in table
    assert "a note" in table
