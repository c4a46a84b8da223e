"""The emulator checked by itself: every planted fault is caught and named, correct texts pass, MLX's rules hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from .emulated import needs_emulator
from .emulator import EmuArray, Emulator, Finding, array
from .emulator.build import CompileError
from .planted import CORRECT, FAULTS, Text

pytestmark = needs_emulator
A = np.arange(64, dtype=np.float32) + 0.5


def launch(text: Text, **options: float) -> np.ndarray:
    kernel = Emulator(**options).metal_kernel("planted", ["a", "n"], ["o"], text.source)  # type: ignore[arg-type]
    (out,) = kernel(
        inputs=[array(A), array(np.zeros(8), "int32")],
        grid=(64 * text.groups, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(text.out,)],
        output_dtypes=[text.dtype],
    )
    return out.values()


@pytest.mark.parametrize("text", FAULTS, ids=lambda text: f"{text.kind}-{text.label}".replace(" ", "-"))
def test_planted_fault_is_found_and_named(text: Text) -> None:
    with pytest.raises(Finding) as caught:
        launch(text)
    assert caught.value.kind == text.kind, str(caught.value)
    words = caught.value.words
    assert {name: str(words.get(name)) for name in text.words} == text.words, str(caught.value)
    if text.line:
        assert (words["file"], words["line"]) == ("source", text.line), str(caught.value)


def test_at_least_three_faults_of_each_kind() -> None:
    few = {kind: n for kind, n in Counter(text.kind for text in FAULTS).items() if n < 3}
    assert not few


def test_endless_loop_ends_at_the_deadline() -> None:
    text = Text("loop", "deadline", "for (int t = 0; t == 0;) {\n}\no[thread_index_in_threadgroup] = a[0];")
    with pytest.raises(Finding, match="deadline"):
        launch(text, deadline=1.0)


EXPECTED = {
    "copy": A,
    "reversal through threadgroup memory": A[::-1],
    "array used twice": 4 * A + 4 * A[::-1],
    "sum by SIMD groups": np.full(64, A.sum()),
    "exchange inside a SIMD group": A[np.arange(64) ^ 1],
    "butterfly": np.repeat(A.reshape(2, 32).sum(1), 32),
    "device memory with its barrier": A[::-1],
    "two groups, two places": np.tile(A, 2),
    "one SIMD group sums": np.concatenate([np.full(32, A[:32].sum()), A[32:]]),
    "barrier in a branch all take": A[::-1],
    "shape of an input": np.full(64, 66.0),
    "rounding to bfloat16": A,
    "one element, read by all": np.full(64, 3.5),
}


@pytest.mark.parametrize("text", CORRECT, ids=lambda text: text.label.replace(" ", "-"))
def test_correct_text_passes(text: Text) -> None:
    np.testing.assert_array_equal(launch(text), EXPECTED[text.label])


def run(source: str, inputs: dict[str, object], **call: object) -> list[EmuArray]:
    kernel = Emulator().metal_kernel("rules", list(inputs), ["o"], source)
    keywords: dict[str, object] = {
        "grid": (64, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(64,)], "output_dtypes": ["float32"],
    }  # fmt: skip
    return kernel(inputs=list(inputs.values()), **(keywords | call))  # type: ignore[arg-type]


INDEX = "const int i = int(thread_position_in_grid.x);\n"


def test_strided_inputs_arrive_in_order() -> None:
    wide = np.arange(256, dtype=np.float32).reshape(64, 4)
    (out,) = run(INDEX + "o[i] = a[i];", {"a": array(wide)[:, 1]})
    np.testing.assert_array_equal(out.values(), wide[:, 1])


def test_scalars_are_references_and_templates_are_constants() -> None:
    source = INDEX + "float x[N];\nx[N - 1] = scale;\no[i] = FLAG ? float(T(x[N - 1])) : 0.0f;"
    template = [("N", 3), ("FLAG", True), ("T", "bfloat16")]
    (out,) = run(source, {"scale": 1.00390625}, template=template)
    np.testing.assert_array_equal(out.values(), np.full(64, 1.0))


def test_last_threadgroup_is_smaller() -> None:
    source = "o[thread_position_in_grid.x] = float(threads_per_threadgroup.x) + simd_sum(1.0f);"
    (out,) = run(source, {"a": 0.0}, grid=(40, 1, 1), output_shapes=[(40,)])
    np.testing.assert_array_equal(out.values(), [64.0] * 32 + [16.0] * 8)


def test_threadgroup_is_clipped_to_the_grid() -> None:
    source = "o[thread_position_in_grid.x] = float(threads_per_threadgroup.x);"
    (out,) = run(source, {"a": 0.0}, grid=(8, 1, 1), output_shapes=[(8,)])
    np.testing.assert_array_equal(out.values(), np.full(8, 8.0))


def test_initial_value_fills_what_is_not_written() -> None:
    (out,) = run(INDEX + "if (i < 2) {\n  o[i] = 5.0f;\n}", {"a": 0.0}, init_value=2.0)
    np.testing.assert_array_equal(out.values(), [5.0] * 2 + [2.0] * 62)


def test_float_does_not_become_bfloat16_silently() -> None:
    with pytest.raises(CompileError):
        run(INDEX + "o[i] = 1.0f;", {"a": 0.0}, output_dtypes=["bfloat16"])


def test_misuse_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="greater than 1024"):
        run(INDEX + "o[i] = a;", {"a": 0.0}, grid=(2048, 1, 1), threadgroup=(2048, 1, 1))
    with pytest.raises(TypeError, match="list"):
        run(INDEX + "o[i] = a;", {"a": [0.0]})
    with pytest.raises(ValueError, match="at least one output"):
        Emulator().metal_kernel("none", ["a"], [], "")
