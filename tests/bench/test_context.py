"""Cost against context: states that are made up, the line, the sizes."""

import json
from dataclasses import replace

import numpy as np
import pytest

import k3mlx
from k3mlx.bench.context import (
    WARM_UP,
    context_points,
    lengths_beyond,
    line_through,
    measure_context,
    spread_of,
    state_sizes,
)
from k3mlx.bench.result import Figure
from k3mlx.config import ModelConfig
from k3mlx.errors import UsageError
from tests.paths import DATA, needs_data


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_a_step_is_taken_after_so_many_tokens(byte_model, backend, monkeypatch):
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    with k3mlx.load(byte_model, backend=backend, device="cpu") as engine:
        lengths = []
        original = engine.backend.forward

        def forward(ids, state, all_logits, hooks):
            lengths.append(state.length)
            logits, after = original(ids, state, all_logits, hooks)
            assert np.isfinite(logits).all()
            return logits, after

        monkeypatch.setattr(engine.backend, "forward", forward)
        figures = measure_context(engine, [64, 7, 7], 2)
    assert lengths == [base + turn for turn in range(WARM_UP + 2) for base in (7, 64)]
    assert figures.keys() == {f"context_{kind}_{n}" for kind in ("kda", "mla") for n in (7, 64)}
    for figure in figures.values():
        assert len(figure.values) == 2
        assert figure.low > 0


def test_time_is_that_of_the_layers_of_the_kind(byte_model, monkeypatch):
    """MLA that takes 20 ms more shows in MLA alone."""
    import time

    from k3mlx.reference import model

    original = model.attend
    monkeypatch.setattr(model, "attend", lambda *rest: (time.sleep(0.02), original(*rest))[1])
    with k3mlx.load(byte_model, backend="numpy") as engine:
        figures = measure_context(engine, [5], 3)
    assert figures["context_mla_5"].low >= 20
    assert figures["context_kda_5"].median < figures["context_mla_5"].low


def test_a_length_that_the_model_does_not_have_is_refused(engine):
    most = 500 - 3 - WARM_UP - 1
    for wrong in (0, most + 1):
        with pytest.raises(UsageError, match=rf"context of {wrong} tokens, expected 1 to {most}"):
            measure_context(engine, [3, wrong], 3)


def test_the_line_through_points():
    line = line_through([(0, 2.0), (1000, 3.0), (2000, 4.0)])
    assert (line.start, line.slope, line.fit) == pytest.approx((2.0, 0.001, 1.0))
    assert line_through([(0, 0.0), (1, 1.0), (2, 0.0)]).fit == pytest.approx(0.0)


def test_points_are_those_of_one_kind_by_length():
    figures = {name: Figure("ms/layer", (n,)) for n, name in enumerate(
        ["context_mla_1000", "context_kda_5", "context_mla_30", "decode_rate"])}  # fmt: skip
    assert context_points(figures, "mla") == [(30, 2), (1000, 0)]
    assert spread_of([(1, 1.0), (2, 2.0), (3, 4.0)]) == 1.5


def test_lengths_go_on_to_a_million():
    assert lengths_beyond([32768, 1024]) == [1024, 32768, 65536, 131072, 262144, 524288, 1048576]


@needs_data
def test_the_sizes_of_the_released_model():
    """434 MB of KDA state in 69 layers and 27.6 kB a token in 24 (model specification §5)."""
    config = ModelConfig.from_dict(json.loads((DATA / "config.json").read_text()))
    one, two = state_sizes(config, [1, 1000], 2, 4)
    assert 69 * one["kda"] / 1e6 == pytest.approx(449, rel=0.01)  # with convolution windows
    assert one["kda"] == two["kda"]
    assert 24 * one["mla"] == pytest.approx(27_648)
    assert two["mla"] == 1000 * one["mla"]
    assert replace(config).layer_kinds.count("kda") == 69
