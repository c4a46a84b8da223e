"""Launch descriptions and dispatch, for every kernel: refusals, switches, counters, views as inputs, MLX's text."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from k3mlx.kernels import KERNELS, Kernels, Unsupported, kernel_text, launch
from k3mlx.kernels.cases import Case, attn_res_case, kda_case, launch_of, rounded, route_case, run_plain
from k3mlx.kernels.texts import read_text

from .emulated import needs_emulator, run
from .emulator import Emulator, EmulatorMaker, array
from .texts import generated

SMALL = {
    "kda_step": kda_case("kda_step", heads=1, width=32, threads=128, dtype="bfloat16"),
    "kda_prefill": kda_case("kda_prefill", heads=3, width=32, tokens=40, threads=128),
    "attn_res_mix": attn_res_case(frozen=2, width=40, threads=128),
    "route_topk": route_case(experts=6, k=2),
}
MAKER = EmulatorMaker(Emulator())
needs_mlx = pytest.mark.skipif(
    importlib.util.find_spec("mlx") is None, reason="mlx is not installed: pip install 'k3mlx[mlx]'"
)
EXPORT = """
import sys, mlx.core as mx
from k3mlx.kernels import KERNELS
from k3mlx.kernels.cases import launch_of
from k3mlx.kernels.mlx_maker import MlxMaker
from tests.kernels.test_launch import SMALL
maker = MlxMaker("metal")
for stem, case in SMALL.items():
    launch = launch_of(case, maker, lambda x, dtype: mx.array(x).astype(getattr(mx, dtype)))
    call = dict(launch.__dict__, verbose=True)
    inputs = call.pop("inputs")
    kernel = maker.build(KERNELS[stem])
    mx.export_function(sys.argv[1], lambda *arrays: kernel(inputs=list(arrays), **call), *inputs)
"""


@needs_mlx
def test_generated_text_is_the_one_mlx_writes(tmp_path: object) -> None:
    # the text goes to the C++ standard output
    command = [sys.executable, "-c", EXPORT, f"{tmp_path}/exported"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    for stem, case in SMALL.items():
        match = re.search(rf"Generated source code for `{stem}`:\n```\n(.*?)\n```", printed, flags=re.S)
        assert match is not None, stem
        assert match[1].strip() == generated(case).metal_text().strip(), stem


@pytest.mark.parametrize("stem", KERNELS)
def test_texts_are_ascii_and_count_their_own_lines(stem: str) -> None:
    header, source = kernel_text(stem)
    assert header.isascii()
    assert source.isascii()
    assert source.splitlines()[0] == f'#line 2 "{stem}.metal"'


def changed(case: Case, position: int, value: object) -> Case:
    arguments = list(case.arguments)
    arguments[position] = value
    return replace(case, arguments=tuple(arguments))


@pytest.mark.parametrize("position", range(12))
def test_kda_refuses_a_wrong_shape_by_name(position: int) -> None:
    case = SMALL["kda_step"]
    wrong = changed(case, position, case.arguments[position][..., :-1])
    with pytest.raises((ValueError, Unsupported), match=r"kda_step: .*expected"):
        launch_of(wrong, MAKER, array)


def test_sizes_that_no_kernel_takes_are_unsupported() -> None:
    with pytest.raises(Unsupported, match="head width 48"):
        launch_of(kda_case("kda_step", width=48), MAKER, array)
    with pytest.raises(Unsupported, match="10 sources"):
        launch_of(attn_res_case(frozen=9, width=32), MAKER, array)
    with pytest.raises(Unsupported, match="too many"):
        launch_of(route_case(experts=400, k=200, threads=128), MAKER, array)
    mixed = replace(SMALL["kda_step"], dtypes=("float32", *SMALL["kda_step"].dtypes[1:]))
    with pytest.raises(Unsupported, match="activations"):
        launch_of(mixed, MAKER, array)
    with pytest.raises(ValueError, match="k is 7"):
        launch.route_topk(MAKER, 128, array(np.zeros((1, 6))), array(np.zeros(6)), 7, 1.0)


def test_buffers_and_threadgroup_of_every_launch_fit_metal() -> None:
    for case in SMALL.values():
        described = launch_of(case, MAKER, array)
        assert all(g % t == 0 for g, t in zip(described.grid, described.threadgroup, strict=True))
        assert sum(p.buffer is not None for p in generated(case).parameters) <= launch.MAX_BUFFERS


@needs_emulator
@pytest.mark.parametrize("stem", ["kda_step", "kda_prefill"])
def test_views_with_strides_give_the_same_bits(stem: str) -> None:
    case = kda_case(stem, batch=2, tokens=3, heads=3, width=32, threads=128)
    fused = np.concatenate(case.arguments[:3], axis=-1)  # as one product for q, k and v would leave them
    views = [fused[..., n * 96 : (n + 1) * 96] for n in range(3)]
    assert not views[1].flags.c_contiguous
    for got, expected in zip(
        run(replace(case, arguments=(*views, *case.arguments[3:]))), run(case), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@needs_emulator
def test_dispatch_counts_launches_and_takes_the_step_or_the_prefill() -> None:
    kernels = Kernels(EmulatorMaker(Emulator(private_check=False)))
    for tokens in (1, 32, 33):
        case = kda_case("kda_step", tokens=tokens, width=32)
        arguments = [
            a if d is None else array(a, d) for a, d in zip(case.arguments, case.dtypes, strict=True)
        ]
        y, _, _ = kernels.kda_step(*arguments)
        assert y.shape == (1, tokens, 32)
    assert (kernels.counters["kda_step"].calls, kernels.counters["kda_prefill"].calls) == (2, 1)


@needs_mlx
def test_disabled_and_unsupported_kernels_fall_back_with_one_note() -> None:
    import mlx.core as mx

    lines: list[str] = []
    kernels = Kernels(MAKER, note=lines.append)
    kernels.disable("route_topk", "it failed", failed=True)
    case = SMALL["route_topk"]
    logits, bias = (mx.array(a) for a in case.arguments[:2])
    for _ in range(2):
        outputs = kernels.select_topk(logits, bias, *case.arguments[2:])
    assert not [check for check in case.judge([np.array(o) for o in outputs]) if not check.passed]
    counter = kernels.counters["route_topk"]
    assert (counter.calls, counter.failures, counter.fallbacks) == (0, 1, 2)
    assert lines == ["route_topk: plain operations instead of the kernel: it failed"]
    wide = attn_res_case(frozen=9, width=32)
    kernels.attn_res_mix(
        *(a if d is None else mx.array(a) for a, d in zip(wide.arguments, wide.dtypes, strict=True))
    )
    assert "10 sources" in lines[1]
    assert len(lines) == 2
    assert kernels.report()[2]["fallbacks"] == 1


@needs_mlx
@pytest.mark.parametrize(
    "case",
    [
        kda_case("kda_step", kind, batch=2, tokens=tokens, heads=3, width=32, dtype=dtype)
        for kind, tokens, dtype in (
            ("plain", 1, "float32"), ("partial", 5, "bfloat16"), ("parallel", 40, "float32"),
            ("saturated", 33, "float16"), ("zero_q", 17, "float32"), ("read_out", 1, "float32"),
        )
    ]
    + [attn_res_case(frozen=n, tokens=2, width=96, dtype=d) for n, d in ((0, "float32"), (8, "bfloat16"))]
    + [route_case(experts=40, k=4, tokens=3, kind=kind) for kind in ("plain", "ties", "nan")],
    ids=lambda c: f"{c.stem}-{c.label}-{c.dtype}".replace(" ", "-"),
)  # fmt: skip
def test_plain_path_passes_the_kernels_judge(case: Case) -> None:
    import mlx.core as mx

    outputs = run_plain(case, lambda x, dtype: mx.array(x).astype(getattr(mx, dtype)))
    values = [np.array(o.astype(mx.float32) if o.dtype in (mx.bfloat16, mx.float16) else o) for o in outputs]
    wrong = [check for check in case.judge(values) if not check.passed]
    assert not wrong, wrong


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_of_inputs_is_to_nearest_even(dtype: str) -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.0], np.float32)
    expected = {
        "bfloat16": [1.0, 1 + 2**-6, 1 + 2**-7, -3.0],
        "float16": [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8, -3.0],
    }
    np.testing.assert_array_equal(rounded(x, dtype), np.array(expected[dtype], np.float32))


def test_k3_common_is_the_header_of_every_kernel_and_keeps_to_its_prefix() -> None:
    """A global function named like one of Metal's or MLX's would be ambiguous: ours begin with k3_."""
    common = read_text("k3_common.metal")
    helpers = re.findall(r"^inline \w+ (\w+)\(", common, re.MULTILINE)
    assert len(helpers) == len(re.findall(r"^inline ", common, re.MULTILINE)) >= 3
    assert [name for name in helpers if not name.startswith("k3_")] == []
    assert all(kernel_text(stem)[0] == common for stem in KERNELS)
