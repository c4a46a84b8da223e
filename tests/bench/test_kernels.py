"""Timing of kernels: what is counted, on small cases through MLX's CPU device."""

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from k3mlx.bench import kernels  # noqa: E402
from k3mlx.kernels.cases import attn_res_case, kda_case, route_case  # noqa: E402


def test_bytes_are_inputs_and_outputs_once():
    case = kda_case("kda_step", tokens=3, heads=2, width=32)
    channels, state = 64, 2 * 32 * 32
    rows = 5 * 3 * channels + 3 * 2  # q, k, v, z, gate; b
    windows = 3 * 3 * channels
    rest = 3 * channels * 4 + 2 + channels + 32  # taps, A_log, dt_bias, o_norm
    assert kernels._bytes(case) == 4 * (rows + windows + state + rest)
    point = kernels._point(case, "plain", 2, kernels._plain(case), 3)
    assert point.nbytes == kernels._bytes(case) + 4 * (3 * channels + windows + state)
    assert point.operations == 7 * 3 * state
    assert len(point.figure.values) == 3
    assert point.figure.low > 0


def test_bytes_follow_the_dtype():
    wide, narrow = (kda_case("kda_step", heads=1, width=32, dtype=d) for d in ("float32", "bfloat16"))
    state_and_weights = 4 * (32 * 32 + 3 * 32 * 4 + 1 + 32 + 32)
    assert kernels._bytes(wide) - state_and_weights == 2 * (kernels._bytes(narrow) - state_and_weights)


@pytest.mark.parametrize(
    ("case", "tokens", "operations"),
    [
        (attn_res_case(frozen=8, tokens=5, width=64), 5, 6 * 9 * 5 * 64),
        (route_case(experts=20, k=4, tokens=7), 7, 4 * 7 * 20),
    ],
)
def test_tokens_and_operations(case, tokens, operations):
    assert kernels.tokens_of(case) == tokens
    assert kernels.operations_of(case) == operations


def test_cases_have_the_released_sizes():
    released = {(case.stem, kernels.tokens_of(case)) for case in kernels.cases(33, "float32")}
    assert released == {
        ("kda_step", 1), ("kda_prefill", 33), ("attn_res_mix", 1), ("attn_res_mix", 33), ("route_topk", 1),
        ("route_topk", 33),
    }  # fmt: skip
    step = next(kernels.cases(33, "float32"))
    assert step.arguments[7].shape == (1, 96, 128, 128)


def test_the_measurement_on_the_cpu(monkeypatch):
    small = [kda_case("kda_step", heads=1, width=32), route_case(experts=20, k=4)]
    monkeypatch.setattr(kernels, "cases", lambda longest, dtype: iter(small))
    monkeypatch.setattr(kernels, "COPIED", {"cpu": 1 << 16})
    rate, points, lines = kernels.measure_kernels("mlx-cpu", 2)
    assert rate > 0
    assert lines == []
    assert [(point.name, point.path) for point in points] == [
        ("kda_step T1", "plain"),
        ("route_topk T1", "plain"),
    ]
    row = points[0].as_dict(2 * points[0].bytes_per_second)
    assert row["of_memory_rate"] == pytest.approx(0.5)


def test_every_launch_has_arrays_of_its_own():
    case = route_case(experts=20, k=4)
    made = []
    original = kernels._fresh

    def fresh(x, dtype):
        made.append(original(x, dtype))
        return made[-1]

    kernels._fresh = fresh
    try:
        make = kernels._plain(case)
        launches = [make(), make()]
        outputs = [launch() for launch in launches for _ in range(2)]
    finally:
        kernels._fresh = original
    assert len(made) == 2 * 2  # logits and bias of each, made once
    np.testing.assert_array_equal(*(np.array(outputs[n][0]) for n in (0, 3)))
