"""Results on disk and their comparison."""

import json

import pytest

from k3mlx.bench.compare import compare, differences
from k3mlx.bench.result import FORM, Figure, figures_as_dict, figures_of, rate, read_result
from k3mlx.errors import UsageError


def test_a_figure_is_its_values():
    figure = rate("tokens/s", 10, [1.0, 2.0, 4.0])
    assert figure.values == (10.0, 5.0, 2.5)
    assert (figure.median, figure.low, figure.high) == (5.0, 2.5, 10.0)


def test_a_result_is_read_as_it_was_written(tmp_path):
    figures = {"decode_rate": Figure("tokens/s", (1.5, 2.5))}
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"k3mlx_bench": FORM, "figures": figures_as_dict(figures)}))
    assert figures_of(read_result(str(file)), "a.json") == figures


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"k3mlx_bench": 99}', "[" * 100_000])
def test_what_is_no_result_is_refused(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="not a result of k3mlx bench"):
        read_result(str(file))
    with pytest.raises(UsageError, match="No such file"):
        read_result(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "figures", [None, [], {"a": 1}, {"a": {"unit": "s", "values": ["x"]}}, {"a": {"unit": "s"}}]
)
def test_damaged_figures_are_refused(figures):
    with pytest.raises(UsageError, match=r"mine\.json: its figures are damaged"):
        figures_of({"figures": figures}, "mine.json")


def test_ratios_and_their_range():
    this = {
        "decode": Figure("ms", (4.0, 5.0, 6.0)),
        "alone": Figure("ms", (1.0,)),
        "unit": Figure("s", (1.0,)),
    }
    other = {"decode": Figure("ms", (2.0, 2.5, 4.5)), "unit": Figure("ms", (1.0,))}
    (ratio,) = compare(this, other)
    assert (ratio.name, ratio.ratio) == ("decode", 2.0)
    assert (ratio.low, ratio.high) == (4.0 / 4.5, 6.0 / 2.0)
    assert ratio.within


def test_repeats_that_do_not_overlap_differ():
    (ratio,) = compare({"a": Figure("ms", (1.0, 1.1))}, {"a": Figure("ms", (1.2, 1.3))})
    assert not ratio.within


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
