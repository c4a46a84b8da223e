"""Engines on overlays: what the dequantised weights give, on both backends, in memory and streamed."""

import json
from dataclasses import replace

import numpy as np
import pytest

import k3mlx
from k3mlx.backend import make_backend
from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.convert import agreement
from k3mlx.convert.agreement import compare
from k3mlx.devices import choose
from k3mlx.errors import UsageError
from k3mlx.governor import plan_memory
from k3mlx.needs import backend_needs
from k3mlx.reference.model import Hooks
from k3mlx.tokenizer import Tokenizer
from tests.paths import NANO
from tests.test_nano import PROMPTS, segments
from tests.tiny import write_model

from .conftest import job

IDS = [1, 5, 2, 9, 3, 7, 11, 20, 23, 30, 13, 4, 8]
DECODED = [6, 2, 17]


@pytest.fixture(scope="module", params=[4, 8])
def quantised(request, source, tmp_path_factory):
    """(overlay, a plain snapshot with the values of its weights)."""
    folder = tmp_path_factory.mktemp("quantised")
    job(source, folder / "overlay", request.param).run()
    with open_checkpoint(folder / "overlay") as checkpoint:
        assert len(checkpoint.quantized) > 30
        tensors = {
            name: checkpoint.raw(name) if ".experts." in name else checkpoint.load(name)
            for name in checkpoint.tensors
        }
    config = json.loads((source / "config.json").read_text())
    return folder / "overlay", write_model(folder / "plain", config, tensors)


def logits_of(folder, **options):
    """[prompt + decoded, V] of a prompt in one pass and of decode steps."""
    with k3mlx.load(folder, **options) as engine:
        session = engine.session()
        rows = [session.feed(IDS, all_logits=True)]
        return np.concatenate(rows + [session.feed([id], all_logits=True) for id in DECODED])


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_engines_compute_with_the_dequantised_weights(quantised, source, backend):
    """The reference in float64 on the values is the law; the original is far from them."""
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    overlay, plain = quantised
    law = logits_of(plain, backend="numpy", dtype="float64")
    got = logits_of(overlay, backend=backend, device="cpu", dtype="float32")
    np.testing.assert_allclose(got, law, atol=1e-4, rtol=0)
    assert np.abs(logits_of(source, backend="numpy", dtype="float64") - law).max() > 1e-2


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_layers_that_are_streamed_give_the_same_bits(quantised, backend):
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    whole, streamed = (streamed_logits(quantised[0], backend, layers) for layers in ((0, 1, 2, 3), (2,)))
    np.testing.assert_array_equal(streamed[0], whole[0])
    assert whole[1] == 0 < streamed[1]


def streamed_logits(folder, backend, resident):
    """Logits with only some layers in memory, and the bytes that were read for the others."""
    choice = choose(backend, "cpu")
    with open_checkpoint(folder) as checkpoint:
        plan = plan_memory(backend_needs(choice, checkpoint, "float32"), None, None, None)
        plan = replace(plan, resident=resident)
        made = make_backend(choice, checkpoint, "float32", None, plan=plan)
        try:
            first, state = made.forward(IDS, made.new_state(), True, Hooks())
            second, _ = made.forward(DECODED[:1], state, True, Hooks())
            return np.concatenate([first, second]), made.dense_report()["bytes_read"]
        finally:
            made.close()


def test_mlx_keeps_the_codes(quantised):
    pytest.importorskip("mlx.core")
    bits = json.loads((quantised[0] / "overlay.json").read_text())["settings"]["bits"]["kda"]
    with k3mlx.load(quantised[0], backend="mlx", device="cpu", dtype="bfloat16") as engine:
        formats = {row["part"]: row["format"] for row in engine.report()["parts"]}
        assert np.isfinite(engine.session().feed(IDS)).all()
    for part in ("kda", "mla", "shared_experts", "head"):
        assert f"{bits}-bit affine" in formats[part]
    assert formats["shared_experts"] == f"{bits}-bit affine"
    assert formats["router"] == "bfloat16"


def test_the_memory_plan_counts_codes(quantised, source):
    pytest.importorskip("mlx.core")
    choice, weights = choose("mlx", "cpu"), {}
    for folder in (quantised[0], source):
        with open_checkpoint(folder) as checkpoint:
            weights[folder] = backend_needs(choice, checkpoint, "bfloat16").dense.total
    assert weights[quantised[0]] < 0.8 * weights[source]


def test_sessions_of_original_and_overlay_are_not_mixed(quantised, source, tmp_path):
    with k3mlx.load(source, backend="numpy") as engine:
        session = engine.session()
        session.feed(IDS)
        session.save(tmp_path / "session")
    with (
        k3mlx.load(quantised[0], backend="numpy") as engine,
        pytest.raises(UsageError, match="saved by another model"),
    ):
        engine.load_session(tmp_path / "session")


@pytest.fixture(scope="module")
def nano8(tmp_path_factory):
    out = tmp_path_factory.mktemp("nano") / "eight"
    job(NANO, out, 8).run()
    return out


@pytest.mark.parametrize("backend", ["numpy", pytest.param("mlx", marks=pytest.mark.slow)])
def test_greedy_answers_of_nano_with_8_bits_are_those_of_the_original(nano8, backend):
    """Every conversation, in one pass: the original's own answers are the expected ones (tests/test_nano.py)."""
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    tokenizer = Tokenizer.load(nano8)
    with k3mlx.load(nano8, backend=backend, device="cpu", dtype="float32") as engine:
        for prompt in PROMPTS:
            ids = tokenizer.encode_segments(segments(prompt, prompt["messages"], False))
            start = len(tokenizer.encode_segments(segments(prompt, prompt["messages"][:-1], True)))
            best = engine.session().feed(ids[:-1], all_logits=True)[start - 1 :].argmax(-1)
            assert best.tolist() == ids[start:], prompt["label"]


def test_agreement(nano8):
    same = compare(NANO, NANO, "A quiet harbour in the grey morning.")
    assert (same.kl_mean, same.top1) == (0, 1)
    close = compare(NANO, nano8, "A quiet harbour in the grey morning.")
    assert same.tokens == close.tokens > 5
    assert 0 < close.kl_mean < 0.05
    assert close.kl_mean <= close.kl_max
    with pytest.raises(UsageError, match="fewer than two tokens"):
        compare(NANO, nano8, "")


def test_figures_of_an_agreement(monkeypatch):
    """By hand: p = (1/2, 1/2) and q = (1/4, 3/4), then p = (9/10, 1/10) and q the same."""
    rows = {NANO: [[0.5, 0.5], [0.9, 0.1]], "overlay": [[0.25, 0.75], [0.9, 0.1]]}
    monkeypatch.setattr(agreement, "_logits", lambda folder, ids: np.log(np.float32(rows[folder])) + 3)
    found = compare(NANO, "overlay", "Two words")
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert found.kl_max == pytest.approx(expected, rel=1e-5)
    assert found.kl_mean == pytest.approx(expected / 2, rel=1e-5)
    assert (found.tokens, found.top1) == (2, 0.5)
