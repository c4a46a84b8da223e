"""Tables, plots and the page: what is shown of a result."""

import copy
import json

import pytest

from k3mlx.bench import plots, tables
from k3mlx.bench.compare import Ratio
from k3mlx.bench.page import page
from k3mlx.bench.result import Figure
from k3mlx.errors import K3Error

SHARES = {
    "attention": 4.0, "router": 0.5, "mlp": 1.0, "experts": 2.0, "expert_wait": 1.5, "head": 0.5, "other": 0.2,
    "dense_wait": 0.1, "outside": 0.2, "hidden": 0.7, "token": 10.0,
}  # fmt: skip


def figures():
    found = {
        "prompt_rate": Figure("tokens/s", (9.0, 10.0, 12.0)),
        "decode_rate": Figure("tokens/s", (100.0,)),
    }
    for phase in ("prompt", "decode"):
        found |= {f"{phase}_{part}": Figure("ms/token", (ms,)) for part, ms in SHARES.items()}
        found[f"{phase}_hit_rate"] = Figure("of experts", (0.25,))
        found[f"{phase}_read"] = Figure("GB/token", (1.5,))
    for length in (100, 200, 300):
        found[f"context_kda_{length}"] = Figure("ms/layer", (1.0,))
        found[f"context_mla_{length}"] = Figure("ms/layer", (1.0 + length / 100,))
    return found


RESULT = {
    "machine": {"chip": "a <fast> chip", "gpu": None},
    "model": {"name": "slice", "layers": 3},
    "runs_on": {"backend": "numpy", "dtype": "float32", "device": "cpu"},
    "options": {"prompt_tokens": 7},
    "steady": {"steady": True},
    "trials": [
        {"step_seconds": [0.01, 0.02], "step_hits": [3, 4], "step_misses": [1, 0]},
        {"step_seconds": [0.03, 0.01], "step_hits": [2, 4], "step_misses": [2, 0]},
    ],
    "kernels": {"copy_bytes_per_second": 1e10, "points": [
        {"name": "kda_step T1", "path": "plain", "bytes": 1000, "operations": 700, "ms": 1.0, "of_memory_rate": 0.1}
    ]},
    "cpu": {"rows": [
        {"op": "read", "tokens": 0, "seconds": 1.0, "bytes": 10, "ratio_to_read": 1.0, "multiply_adds": 0},
        {"op": "mxfp4", "tokens": 1, "seconds": 2.0, "bytes": 10, "ratio_to_read": 0.5, "multiply_adds": 20},
    ]},
}  # fmt: skip


def test_rates_in_words():
    assert tables.rates(figures()).splitlines()[0] == (
        "prompt: 10 tokens/s (9 to 12), 25.0% of experts in memory, 1.5 GB/token read"
    )


def test_the_split_in_columns():
    lines = tables.split_table(figures()).splitlines()
    assert lines[0].split() == ["ms", "a", "token", "prompt", "share", "decode", "share"]
    assert lines[1].split() == ["attention", "4", "40.0%", "4", "40.0%"]
    assert lines[-1].split() == ["(expert", "loading,", "hidden)", "0.7", "7.0%", "0.7", "7.0%"]
    assert any(line.startswith("router ") for line in lines)
    assert lines[-2].split() == ["whole", "10", "100.0%", "10", "100.0%"]
    assert any(line.startswith("dense loading, waited for ") for line in lines)


def test_dense_weights_that_are_in_memory_have_no_row():
    resident = figures() | {f"{phase}_dense_wait": Figure("ms/token", (0.0,)) for phase in tables.PHASES}
    assert "dense loading" not in tables.split_table(resident)


def test_a_router_that_cannot_be_told_apart_has_no_row():
    joint = figures() | {f"{phase}_router": Figure("ms/token", (0.0,)) for phase in ("prompt", "decode")}
    text = tables.split_table(joint)
    assert "attention with router" in text
    assert "\nrouter" not in text


def test_steadiness_in_words():
    verdict = {"steady": True, "reasons": [], "others": None, "criterion": "C"}
    assert tables.steadiness(verdict) == "steady (other processes: not known here); that is: C"
    text = tables.steadiness({**verdict, "steady": False, "reasons": [f"r{n}" for n in range(9)]})
    assert text.splitlines()[0].startswith("NOT STEADY")
    assert "r5" in text
    assert "r6" not in text
    assert "and 3 more" in text


def test_context_in_columns():
    sizes = [{"tokens": n, "kda": 6_000_000, "mla": 1152 * n} for n in (100, 200, 300, 600)]
    lines = tables.context_table(figures(), sizes).splitlines()
    assert lines[1].split() == ["100", "1", "2", "6", "MB", "115", "kB"]
    assert lines[4].split() == ["600", "6", "MB", "691", "kB"]
    assert lines[5] == "KDA: all lengths within 0.0%"
    assert lines[6] == "MLA: 1 ms + 10 ms for each 1,000 tokens (R² 1.0000)"


def test_a_comparison_says_what_differs():
    text = tables.comparison(
        [Ratio("a", "ms", 2.0, 1.0, 2.0, 1.8, 2.2), Ratio("b", "ms", 1.0, 1.0, 1.0, 0.0, 3.4e69)],
        ["options: x"],
    )
    rows = text.splitlines()
    assert rows[1].split() == ["a,", "ms", "2", "1", "2.000", "1.800", "2.200", "differs"]
    assert rows[2].split()[-3:] == ["1.000", "0.000", "3e+69"]
    assert rows[3].startswith("from, to: 99% range")
    assert rows[4:] == ["options: x"]


def test_a_comparison_of_one_process_each_says_what_it_does_not_know():
    text = tables.comparison([Ratio("a", "ms", 2.0, 1.0, 2.0, 1.8, 2.2, known=False)], [])
    assert text.splitlines()[1].endswith("beyond the repeats")
    assert text.splitlines()[2].startswith("one process each: how much processes vary is not known")
    assert "differs" not in text


def test_a_picture_of_everything(tmp_path):
    pytest.importorskip("matplotlib")
    panels = plots._panels(RESULT, figures())
    assert len(panels) == 6  # time, split, hit rate, context, two rooflines
    plots.write_picture(str(tmp_path / "a.png"), RESULT, figures())
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_what_is_drawn():
    canvas = pytest.importorskip("matplotlib.figure").Figure()
    axes = canvas.subplots(2, 3).flat
    for draw, ax in zip(plots._panels(RESULT, figures()), axes, strict=True):
        draw(ax)
    time, split, hits, context, gpu, cpu = canvas.axes
    assert list(time.lines[0].get_xdata()) == [7, 8]
    assert list(time.lines[0].get_ydata()) == [20.0, 15.0]
    assert split.patches[0].get_width() == pytest.approx(0.4)
    assert list(hits.lines[0].get_ydata()) == [0.75, 1.0, 0.5, 1.0]
    assert [list(line.get_ydata()) for line in context.lines] == [[1.0] * 3, [2.0, 3.0, 4.0]]
    assert list(gpu.lines[1].get_xdata()) + list(gpu.lines[1].get_ydata()) == pytest.approx([0.7, 7e-4])
    roof = gpu.lines[0]
    assert roof.get_ydata()[0] == pytest.approx(10 * roof.get_xdata()[0])  # 10 GB/s
    assert list(cpu.lines[1].get_xdata()) + list(cpu.lines[1].get_ydata()) == pytest.approx([4.0, 20e-9])


def test_nothing_to_draw_is_said():
    pytest.importorskip("matplotlib")
    with pytest.raises(K3Error, match="nothing that was measured can be drawn"):
        plots.picture({"machine": {"chip": "x", "gpu": None}}, {})


def test_the_page_holds_the_result_and_no_markup_of_others():
    pytest.importorskip("matplotlib")
    text = page(RESULT, figures(), "tables & <b>")
    assert "tables &amp; &lt;b&gt;" in text
    assert "a &lt;fast&gt; chip" in text
    assert "<fast>" not in text
    assert text.count("data:image/png;base64,") == 1
    assert "http" not in text
    held = text.split("<pre>")[-1].split("</pre>")[0]
    import html

    assert json.loads(html.unescape(held)) == RESULT


def test_a_title_warns_of_figures_that_are_not_steady():
    unsteady = copy.deepcopy(RESULT)
    unsteady["steady"]["steady"] = False
    assert plots.title(RESULT) == "slice, 3 layers · numpy float32 on cpu · a <fast> chip"
    assert plots.title(unsteady).endswith(" · NOT STEADY")
