"""Figures and results on disk."""

import json

import pytest

from k3mlx.bench.result import FORM, Figure, figures_as_dict, figures_of, joined, rate, read_result
from k3mlx.errors import UsageError


def test_a_figure_is_its_values():
    figure = rate("tokens/s", 10, [1.0, 2.0, 4.0])
    assert figure.values == (10.0, 5.0, 2.5)
    assert (figure.median, figure.low, figure.high) == (5.0, 2.5, 10.0)


def test_the_values_of_processes_are_kept_apart():
    one = {"a": Figure("ms", (5.0, 1.0, 2.0)), "only here": Figure("ms", (1.0,))}
    figures = joined([one, {"a": Figure("ms", (9.0, 8.0))}])
    assert figures == {"a": Figure("ms", (5.0, 1.0, 2.0, 9.0, 8.0), (3, 2))}
    assert figures["a"].process_medians == [2.0, 8.5]
    assert one["a"].process_medians == [2.0]


@pytest.mark.parametrize("repeats", [(), (2, 1)])
def test_a_result_is_read_as_it_was_written(tmp_path, repeats):
    figures = {"decode_rate": Figure("tokens/s", (1.5, 2.5, 2.0), repeats)}
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
    "figures",
    [
        None,
        [],
        {"a": 1},
        {"a": {"unit": "s", "values": ["x"]}},
        {"a": {"unit": "s"}},
        {"a": {"unit": "s", "values": [1, 2], "repeats": [1]}},
        {"a": {"unit": "s", "values": [1, 2], "repeats": [2, 0]}},
        {"a": {"unit": "s", "values": [1, 2], "repeats": 2}},
    ],
)
def test_damaged_figures_are_refused(figures):
    with pytest.raises(UsageError, match=r"mine\.json: its figures are damaged"):
        figures_of({"figures": figures}, "mine.json")
