"""Findings about machines that are made up, and that this one can be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from k3mlx import machine
from k3mlx.doctor.findings import FATAL, OK, WARNING, Finding
from k3mlx.doctor.outputs import Process
from k3mlx.doctor.system import System, check_system, look_at_system
from k3mlx.machine import Available

from .facts import GB, LINUX, MAC


def found(system: System, code: str) -> Finding:
    (finding,) = [finding for finding in check_system(system) if finding.code == code]
    return finding


@pytest.mark.parametrize("system", [LINUX, MAC])
def test_a_machine_in_good_order(system: System) -> None:
    assert {finding.level for finding in check_system(system)} == {OK}
    assert "50 GB of 64 GB could be had" in found(system, "free-memory").text


@pytest.mark.parametrize(
    ("system", "code", "words"),
    [
        (replace(LINUX, memory=None), "free-memory", "does not say"),
        (replace(LINUX, pressure=machine.WARN), "free-memory", "memory is short"),
        (replace(LINUX, swap=(8 * GB, 7 * GB)), "swap", "7 GB of 8 GB"),
        (replace(MAC, translated=True), "translated", "Rosetta"),
        (replace(MAC, macos=(13, 6)), "macos", "macOS 13.6"),
        (replace(LINUX, processes=(Process(9, "huge", 20 * GB),)), "processes", "9 huge 20"),
    ],
)
def test_what_is_worth_a_warning(system: System, code: str, words: str) -> None:
    finding = found(system, code)
    assert finding.level == WARNING
    assert words in finding.text
    assert finding.remedy


@pytest.mark.parametrize("system", [replace(LINUX, python=(3, 9, 18)), replace(LINUX, bits=32)])
def test_a_python_that_cannot_be_used(system: System) -> None:
    finding = found(system, "python")
    assert finding.level == FATAL
    assert "64-bit Python 3.10 or later" in finding.remedy


def test_the_limit_of_a_control_group_is_named() -> None:
    room = Available(3 * GB, 4 * GB, "control group limit /sys/fs/cgroup/box/memory.max")
    assert "box/memory.max" in found(replace(LINUX, memory=room), "free-memory").text


def test_the_wired_limit_and_how_to_raise_it() -> None:
    assert not [finding for finding in check_system(LINUX) if finding.code == "wired-limit"]
    assert "the system's own choice" in found(MAC, "wired-limit").text
    raised = found(replace(MAC, wired_limit=57344), "wired-limit").text
    assert "60.1 GB" in raised
    assert "sudo sysctl iogpu.wired_limit_mb=" in raised


def test_performance_cores_are_told_apart() -> None:
    assert "14 cores, 10 of them performance cores" in found(MAC, "system").text


def test_only_large_processes_are_named_in_the_line_and_the_largest_in_the_details() -> None:
    many = [Process(n, f"p{n}", n * GB) for n in range(1, 9)]
    finding = found(replace(LINUX, processes=tuple(many)), "processes")
    assert [line.split()[1] for line in finding.details] == ["p8", "p7", "p6", "p5", "p4"]
    assert "p7" in finding.text
    assert "p6" not in finding.text  # less than a tenth of memory
    assert found(replace(LINUX, processes=None, platform="win32"), "processes").level == OK


def test_this_machine() -> None:
    system = look_at_system()
    codes: Sequence[str] = [finding.code for finding in check_system(system)]
    assert codes[:2] == ["python", "system"]
    assert system.cores >= 1
    assert system.chip
    assert system.name
