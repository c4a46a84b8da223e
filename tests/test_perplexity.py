"""Perplexity: windows that score each token once, the sums against a plain computation, resuming, k3-nano's figure."""

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import k3mlx
from k3mlx.errors import UsageError
from k3mlx.perplexity import perplexity, token_nats, windows
from scripts.nano.data import Encoder
from scripts.nano.evaluate import MODEL, prose_nats, prose_rows

PROSE = (Path(__file__).parent / "nano_prose.txt").read_text("utf-8")
IDS = np.random.default_rng(5).integers(0, 256, 60).tolist()


@pytest.mark.parametrize("count", [2, 3, 10, 11, 97])
@pytest.mark.parametrize(("window", "stride"), [(1, 1), (7, 7), (7, 3), (10, 1), (200, 200)])
def test_every_token_but_the_first_is_scored_once(count, window, stride):
    found = windows(count, window, stride)
    assert [n for w in found for n in range(w.first, w.stop + 1)] == list(range(1, count))
    assert all(w.stop - w.start <= window and w.start < w.first for w in found)
    assert all(after.start - before.start == stride for before, after in pairwise(found))


@pytest.mark.parametrize(
    ("count", "window", "stride"), [(1, 5, 5), (0, 5, 5), (9, 5, 6), (9, 5, 0), (9, 0, 0)]
)
def test_windows_that_cannot_be(count, window, stride):
    with pytest.raises(UsageError):
        windows(count, window, stride)


def plain(engine, ids, window, stride):
    """Nats of each id by the definition: one session a window, all logits kept."""
    nats = {}
    for start in range(0, len(ids) - 1, stride):
        fed = ids[start : start + window]
        logits = engine.session().feed(fed, all_logits=True).astype(np.float64)
        for row, place in zip(logits, range(start + 1, start + len(fed) + 1), strict=True):
            if place < len(ids):
                nats.setdefault(place, np.log(np.exp(row).sum()) - row[ids[place]])
    return nats


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 5), (59, 59), (500, 100)])
def test_sums_are_those_of_the_definition(engine, window, stride):
    found = perplexity(engine, IDS, window, stride)
    nats = plain(engine, IDS, window, stride)
    assert found.tokens == len(nats) == 59
    assert found.nats == pytest.approx(sum(nats.values()), abs=1e-4)
    assert found.bytes == 59  # a vocabulary of single bytes
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / 59)


def test_token_nats_of_logits_in_pieces(monkeypatch):
    monkeypatch.setattr("k3mlx.perplexity.ROWS", 20)
    logits, targets = np.random.default_rng(0).standard_normal((7, 10)) * 5, [3, 1, 4, 1, 5, 9, 2]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert token_nats(logits, targets) == pytest.approx(-np.log(p[np.arange(7), targets]).sum())


class Interrupted(Exception):
    pass


def test_work_that_stopped_goes_on(engine, tmp_path):
    state, whole, seen = tmp_path / "state", perplexity(engine, IDS, 8, 4), []

    def stop(done, total, sums):
        if done == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        perplexity(engine, IDS, 8, 4, state, stop)
    found = perplexity(engine, IDS, 8, 4, state, lambda done, total, sums: seen.append(done))
    assert seen[0] == 4
    assert (found.nats, found.tokens, found.bytes, found.windows) == (
        whole.nats, whole.tokens, whole.bytes, whole.windows,
    )  # fmt: skip
    again = perplexity(engine, IDS, 8, 4, state)
    assert again == found
    assert list(tmp_path.iterdir()) == [state]


@pytest.mark.parametrize(("ids", "window", "stride"), [(IDS[:-1], 8, 4), (IDS, 9, 4), (IDS, 8, 5)])
def test_the_state_of_other_work_is_refused(engine, tmp_path, ids, window, stride):
    perplexity(engine, IDS, 8, 4, tmp_path / "state")
    with pytest.raises(UsageError, match="belongs to another"):
        perplexity(engine, ids, window, stride, tmp_path / "state")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"key": "", "sums": {"speed": 1}})])
def test_a_file_that_is_no_state_is_refused(engine, tmp_path, text):
    (tmp_path / "state").write_text(text)
    with pytest.raises(UsageError, match="no state of k3mlx perplexity"):
        perplexity(engine, IDS, 8, 4, tmp_path / "state")
    assert (tmp_path / "state").read_text() == text


def test_a_window_longer_than_the_context_is_refused(engine):
    with pytest.raises(UsageError, match="500"):
        perplexity(engine, IDS, 501)


def test_nano_equals_the_training_scripts_figure_on_both_backends():
    """Rows of 128 by the evaluation of the training scripts, on held-out prose cut so that its rows do not overlap."""
    encoder = Encoder(MODEL)
    ids = encoder.prose(PROSE).tolist()[: 3 * 128 + 1]
    rows = [ids[start : start + 129] for start in range(0, 384, 128)]
    with k3mlx.load(MODEL, backend="numpy") as engine:
        expected = prose_nats(engine, rows)
        on_numpy = perplexity(engine, ids, 128).nats_per_token
    with k3mlx.load(MODEL, backend="mlx", device="cpu") as engine:
        on_mlx = perplexity(engine, ids, 128).nats_per_token
    assert 3 < expected < 4.5
    assert on_numpy == pytest.approx(expected, abs=1e-6)
    assert on_mlx == pytest.approx(on_numpy, abs=1e-4)


def test_rows_of_the_training_scripts_are_windows():
    """On a text of a whole number of rows, the rows that its evaluation spreads over it are the windows of 512 ids."""
    ids = list(range(5 * 512 + 1))
    encoder = SimpleNamespace(
        prose=lambda text: np.array(ids), tokenizer=SimpleNamespace(encode=lambda text: [])
    )
    rows, _ = prose_rows(encoder, "")
    assert rows == [ids[w.start : w.stop + 1] for w in windows(len(ids), 512, 512)]
