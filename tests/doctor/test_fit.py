"""Findings about memory: what fits, what would, and what the GPU may wire."""

from __future__ import annotations

import pytest

from k3mlx.devices import Choice
from k3mlx.doctor.findings import FATAL, OK, WARNING
from k3mlx.doctor.fit import check_experts_format, check_memory, check_wired
from k3mlx.governor import all_resident, plan_memory, smallest_memory, smallest_with
from k3mlx.memory import format_size
from tests.needs import MB, NEEDS

from .facts import GB


def test_a_model_that_fits_says_how_much_of_it_is_in_memory() -> None:
    plan, line = check_memory(NEEDS, 12_000 * MB, None)
    assert plan is not None
    assert line.level == OK
    assert f"{plan.cache // NEEDS.expert} of 900 experts in memory" in line.text
    assert line.data["cache"] == plan.cache


def test_weights_that_are_read_at_each_pass_are_a_warning_with_what_would_hold_them() -> None:
    plan, line = check_memory(NEEDS, 1_500 * MB, None)
    assert plan is not None
    assert plan.dense_bytes_per_pass > 0
    assert line.level == WARNING
    assert format_size(smallest_with(NEEDS, all_resident)) in line.remedy


def test_a_budget_that_is_too_small_names_the_smallest_that_is_not() -> None:
    smallest = smallest_memory(NEEDS)
    plan, line = check_memory(NEEDS, smallest - 1, None)
    assert plan is None
    assert line.level == FATAL
    assert str(smallest) in line.text
    assert format_size(smallest) in line.remedy
    assert check_memory(NEEDS, smallest, None)[1].level == WARNING
    cache = 200 * NEEDS.expert  # more of it has been asked for
    assert line.data["smallest"] < check_memory(NEEDS, smallest, cache)[1].data["smallest"]


@pytest.mark.parametrize(
    ("limit", "total", "remedy"),
    [
        (None, 64 * GB, None),
        (2 * GB, 64 * GB, None),
        (GB, 64 * GB, "sudo sysctl iogpu.wired_limit_mb=2304"),
        (GB, None, "sudo sysctl iogpu.wired_limit_mb=2304"),
        (GB, 8 * GB, "k3mlx convert"),  # too little would be left to the system
    ],
)
def test_weights_and_the_wired_limit(limit: int | None, total: int | None, remedy: str | None) -> None:
    plan = plan_memory(NEEDS, 12_000 * MB, None)
    assert plan.weights == 1280 * MB
    lines = list(check_wired(plan, limit, total))
    assert len(lines) == (remedy is not None)
    for line in lines:
        assert line.level == WARNING
        assert remedy is not None
        assert remedy in line.remedy


def test_affine_experts_are_for_mlx() -> None:
    assert list(check_experts_format(Choice("mlx", "cpu"), affine=True)) == []
    assert list(check_experts_format(Choice("numpy", "cpu"), affine=False)) == []
    assert len(list(check_experts_format(Choice("numpy", "cpu"), affine=True))) == 1
