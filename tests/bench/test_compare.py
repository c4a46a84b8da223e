"""Ratios of two results: what counts as an observation, the range, and how often it is wrong."""

from math import exp, lgamma, log, pi, sqrt

import numpy as np
import pytest

from k3mlx.bench.compare import CONFIDENCE, STUDENT, compare, differences, unsteady
from k3mlx.bench.result import Figure

PAIRS = 300


def ratio(this, other):
    (found,) = compare({"a": this}, {"a": other})
    return found


def test_a_process_counts_once_by_its_median():
    this = Figure("ms", (4.0, 4.0, 90.0, 9.0, 9.0, 0.1), (3, 3))
    found = ratio(this, Figure("ms", (2.0, 4.5, 2.0, 2.0), (1, 1, 1, 1)))
    assert (found.this, found.other) == pytest.approx((6.0, (2.0 * 4.5 * 2 * 2) ** 0.25))
    assert found.ratio == pytest.approx(found.this / found.other)
    logs = [[log(4), log(9)], [log(2), log(4.5), log(2), log(2)]]
    squares = sum((x - np.mean(group)) ** 2 for group in logs for x in group)
    reach = exp(4.604 * sqrt(squares / 4 * (1 / 2 + 1 / 4)))
    assert (found.low, found.high) == pytest.approx((found.ratio / reach, found.ratio * reach))
    assert found.known


@pytest.mark.parametrize("free", range(1, len(STUDENT) + 1))
def test_quantiles_of_student(free):
    """The density of t with `free` degrees of freedom, from -q to q: x = sqrt(free) tan(y) makes it cos(y)^(free-1)."""
    end = np.arctan(STUDENT[free - 1] / sqrt(free))
    area = end * np.mean(np.cos(end * (np.arange(20000) + 0.5) / 20000) ** (free - 1))
    factor = exp(lgamma((free + 1) / 2) - lgamma(free / 2)) / sqrt(pi)
    assert 2 * factor * area == pytest.approx(CONFIDENCE, abs=2e-5)


def figures(rng, level, processes, of_process=0.05, of_repeat=0.01, repeats=5):
    """Processes that differ by `of_process`, each with repeats that differ by `of_repeat`."""
    places = level * np.exp(of_process * rng.standard_normal((processes, 1)))
    values = places * np.exp(of_repeat * rng.standard_normal((processes, repeats)))
    return Figure("ms", tuple(values.ravel().tolist()), (repeats,) * processes if processes > 1 else ())


def verdicts(level, processes, seed=0):
    """Of pairs of results whose true ratio is `level`."""
    rng = np.random.default_rng(seed)
    return [ratio(figures(rng, level, processes), figures(rng, 1.0, processes)).verdict for _ in range(PAIRS)]


@pytest.mark.parametrize("processes", [2, 3, 5, 8])
def test_equal_results_are_called_different_once_in_a_hundred(processes):
    assert verdicts(1.0, processes).count("differs") <= 0.03 * PAIRS


def test_what_only_knows_the_repeats_of_one_process_is_wrong_more_often_than_not():
    found = verdicts(1.0, 1)
    assert found.count("beyond the repeats") > PAIRS / 2
    assert "differs" not in found


@pytest.mark.parametrize(("processes", "least"), [(3, 0.6), (5, 0.99)])
def test_a_true_difference_is_called_one(processes, least):
    assert verdicts(1.3, processes).count("differs") >= least * PAIRS


def test_one_process_against_several_goes_by_the_variation_of_those():
    several = Figure("ms", (1.0, 1.1, 1.2), (1, 1, 1))
    assert ratio(Figure("ms", (1.4, 1.41)), several).verdict == ""
    assert ratio(Figure("ms", (4.0, 4.1)), several).verdict == "differs"


def test_one_process_each_has_the_range_of_its_repeats_and_no_difference():
    found = ratio(Figure("ms", (4.0, 5.0, 6.0)), Figure("ms", (2.0, 2.5, 4.5)))
    assert (found.this, found.other, found.ratio) == pytest.approx((5.0, 2.5, 2.0))
    assert (found.low, found.high, found.known) == (4.0 / 4.5, 6.0 / 2.0, False)
    assert found.verdict == ""
    assert ratio(Figure("ms", (1.0, 1.1)), Figure("ms", (1.2, 1.3))).verdict == "beyond the repeats"


def test_equal_counts_are_no_difference_and_others_are():
    this = Figure("GB", (0.495,) * 9, (3, 3, 3))
    assert ratio(this, Figure("GB", (0.495,) * 4, (2, 2))).verdict == ""
    assert ratio(this, Figure("GB", (0.496,) * 4, (2, 2))).verdict == "differs"


def test_processes_that_have_nothing_in_common_still_have_a_range():
    found = ratio(Figure("ms", (1e-9, 1e9), (1, 1)), Figure("ms", (1.0,)))
    assert 0 <= found.low < 1 < found.high < float("inf")


def test_only_figures_of_one_name_and_unit_are_compared():
    one = {"a": Figure("ms", (1.0,)), "b": Figure("s", (1.0,)), "c": Figure("s", (1.0,))}
    assert [r.name for r in compare(one, {"a": Figure("ms", (1.0,)), "b": Figure("ms", (1.0,))})] == ["a"]


def test_a_figure_that_was_0_has_no_ratio():
    assert compare({"a": Figure("ms", (0.0, 1.0))}, {"a": Figure("ms", (1.0,))}) == []
    assert compare({"a": Figure("ms", (1.0,))}, {"a": Figure("ms", (0.0,))}) == []


def test_what_differs_beside_is_named():
    this = {"options": {"memory": "auto", "p": 1}, "machine": {"chip": "x"}, "model": None}
    other = {"options": {"memory": "4GB", "p": 1}, "machine": {"chip": "x", "gpu": "y"}}
    assert differences(this, other) == [
        "machine: gpu is None, in the other y",
        "options: memory is auto, in the other 4GB",
    ]


def test_figures_that_are_not_steady_are_named():
    steady, not_steady = {"steady": {"steady": True}}, {"steady": {"steady": False}}
    assert unsteady(steady, {}) == []
    assert unsteady(steady, not_steady) == ["the other is not steady: its ratios say little"]
    assert len(unsteady(not_steady, not_steady)) == 2
