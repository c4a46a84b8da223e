"""The verdicts of `validate` one by one: elements, router choices, divergences, what is compared and what is not."""

import json

import numpy as np
import pytest

from k3mlx.errors import UsageError
from k3mlx.validate import Options, parse_spec, validate
from k3mlx.validate.agreement import agreement
from k3mlx.validate.compare import TIE, StageResult, by_rising_id, compare, compare_ids, row_size
from k3mlx.validate.path import REFERENCE, PathSpec, open_path
from k3mlx.validate.watch import stage_filter
from tests.tiny import config_dict, write_random_model


def test_worst_element_with_its_place():
    expected = np.ones((3, 5, 7))
    expected[1] = 100
    got = expected.copy()
    got[2, 4, 1] += 0.02
    got[1, 0, 0] += 1.0  # less, in a row of large numbers
    found = compare(3, "kda.o", got, expected, 1e-2, first=10)
    assert (found.at, found.got, found.expected) == ((12, 4, 1), pytest.approx(1.02), 1)
    assert found.error == pytest.approx(0.02)
    assert not found.ok
    assert "layer 3, kda.o[12, 4, 1]: got 1.02, expected 1," in found.sentence()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_are_the_worst(bad):
    got = np.zeros((2, 3))
    got[1, 2] = bad
    found = compare(0, "q", got, np.zeros((2, 3)), 1e9)
    assert found.at == (1, 2)
    assert not found.ok


def test_other_shapes_never_pass():
    assert not compare(0, "q", np.zeros((2, 3)), np.zeros((3, 2)), 1e9).ok


def test_a_row_that_cancels_is_measured_by_its_neighbours_but_a_head_by_itself():
    expected = np.array([[1.0, -1.0], [1.0, 1.0], [1e-6, 0.0]])
    got = expected + 1e-6
    size = row_size("b", expected)
    assert compare(0, "b", got, expected, 1e-5, size=size).ok
    assert not compare(0, "b", got, expected, 1e-5).ok
    assert row_size("kda.state", expected) == 0


def test_states_are_not_numbered_by_tokens():
    got = np.zeros((4, 3, 3))
    got[2, 1, 0] = 1
    assert compare(0, "kda.state", got, np.ones((4, 3, 3)), 1, first=50).at[0] < 4


BIASED = np.array([[0.9, 0.5, 0.5 + TIE / 2, 0.1]])


@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        ([0, 2], 0),
        ([2, 0], 0),  # the order says nothing
        ([0, 1], TIE / 2),  # a tie
        ([0, 3], 0.4 + TIE / 2),
        ([0, 0], np.inf),
        ([0, 4], np.inf),
        ([-1, 2], np.inf),
    ],
)
def test_router_choices_are_judged_by_what_they_cost(chosen, error):
    found = compare_ids(1, np.array([chosen]), np.array([[0, 2]]), BIASED, 7)
    assert found.error == pytest.approx(error)
    assert found.ok == (error <= TIE)
    assert found.at[0] == 7


def test_weights_are_compared_by_id():
    ids = np.array([[5, 2, 9]])
    assert by_rising_id(ids, np.array([[0.5, 0.2, 0.9]])).tolist() == [[0.2, 0.5, 0.9]]


def test_divergences_are_near_ties_or_errors():
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((3, 1000))
    expected[:, :2] = [[8.0, 7.9999], [8, 4], [8, 4]]
    got = expected + 1e-3 * rng.standard_normal(expected.shape)
    got[0, :2] = 7.9999, 8.0
    got[1, :2] = 4, 8
    found = agreement(expected, got)
    assert [(d.position, d.got_id, d.near_tie) for d in found.divergences] == [(0, 1, True), (1, 1, False)]
    assert found.divergences[1].margin == pytest.approx(4)
    assert found.top1 == pytest.approx(1 / 3)
    assert not found.ok
    assert agreement(expected, expected).ok
    noisy = agreement(expected, got + rng.standard_normal(expected.shape))
    assert noisy.divergences[-1].margin == pytest.approx(4)
    assert not noisy.ok  # noise so large explains the margin, but that is no tie
    assert agreement(expected, expected).kl_max == 0


def test_kl_is_that_of_softmax():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
    found = agreement(np.log(p)[None] + 3, np.log(q)[None] - 5)
    assert found.kl_mean == pytest.approx(float((p * np.log(p / q)).sum()))


def test_stage_patterns():
    wanted = stage_filter("kda.*, moe.weights")
    assert [wanted(s) for s in ("kda.q", "moe.weights", "moe.ids", "mlp")] == [True, True, False, False]


def test_specs():
    assert parse_spec("mlx,device=cpu,experts-kernel=stream,cpu-threads=3") == PathSpec(
        "mlx", "cpu", experts_kernel="stream", cpu_threads=3
    )
    for wrong in ("numpy,speed=9", "numpy,dtype", "numpy,kernels=maybe", "numpy,cpu_threads=x"):
        with pytest.raises(UsageError):
            parse_spec(wrong)


def test_figures_that_are_none_are_text_in_json(both):
    report = validate(*both, range(3), Options(layer=0, stages="kda.q"))
    bad = StageResult(0, "kda.q", float("inf"), 1e-4, (0,), float("nan"), 1.0)
    report.layers[0].stages[0] = bad
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (found["first"]["error"], found["first"]["got"]) == ("inf", "nan")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    rng = np.random.default_rng(8)
    folder = write_random_model(tmp_path_factory.mktemp("model"), config_dict(), rng)
    opened = [open_path(spec, str(folder))[0] for spec in (REFERENCE, parse_spec("numpy"))]
    yield opened
    for path in opened:
        path.close()


def test_one_layer_token_and_some_stages(both):
    report = validate(*both, range(9), Options(layer=3, token=7, stages="kda.q,moe.*"))
    assert [layer.layer for layer in report.layers] == [3]
    assert {stage.at[0] for stage in report.stages} == {7}
    assert [stage.stage for stage in report.stages][:2] == ["kda.q", "moe.logits"]
    assert report.agreement is None


def test_pieces_cover_prompt_and_decode(both):
    assert validate(*both, range(9), Options(decode=3)).pieces == [6, 1, 1, 1]
    assert validate(*both, [5], Options(decode=3)).pieces == [1]


def test_tolerance_is_as_asked(both):
    report = validate(*both, range(9), Options(tolerance=1e-12))
    assert not report.passed
    assert report.to_dict()["first"]["tolerance"] == 1e-12


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        ([], Options()),
        ([64], Options()),
        ([-1], Options()),
        ([1], Options(layer=5)),
        ([1], Options(token=1)),
        ([1], Options(decode=-1)),
        ([1, 2], Options(stages="kda.qq")),
    ],
)
def test_what_there_is_not_is_refused(both, ids, options):
    with pytest.raises(UsageError):
        validate(*both, ids, options)
