"""Engine and Session: feeding, snapshots, files, cancellation, errors, counters."""

import json

import numpy as np
import pytest

import k3mlx
from k3mlx.checkpoint.writer import write_safetensors
from k3mlx.engine import Cancelled
from k3mlx.errors import K3Error, ModelFilesError, ResourceError, UsageError
from tests.tiny import random_config, random_tensors, write_model, write_random_model

IDS = [5, 9, 300, 17, 2, 2, 41]


def test_feed_returns_the_last_row_or_all_rows(engine):
    last = engine.session().feed(IDS)
    rows = engine.session().feed(IDS, all_logits=True)
    assert last.shape == (512,)
    assert rows.shape == (7, 512)
    assert last.dtype == rows.dtype == np.float32
    np.testing.assert_allclose(rows[-1], last, atol=1e-5)


def test_session_remembers_what_was_fed(engine):
    session = engine.session()
    assert session.ids == []
    session.feed(IDS[:3])
    session.feed(IDS[3:])
    assert session.ids == IDS
    assert len(session) == 7
    session.ids.append(1)  # a copy: changing it changes nothing
    assert session.ids == IDS


def test_long_prompts_run_in_steps_and_agree(byte_model):
    ids = np.random.default_rng(0).integers(0, 512, 150).tolist()
    with k3mlx.load(byte_model, dtype="float64") as whole:
        expected = whole.session().feed(ids, all_logits=True)
    for step in (1, 7, 64, 149):
        with k3mlx.load(byte_model, dtype="float64", prefill_step_size=step) as engine:
            rows = engine.session().feed(ids, all_logits=True)
            assert engine.report()["prefill_chunk"] == step
        np.testing.assert_allclose(rows, expected, atol=1e-6)


def test_restore_goes_back_and_over(engine):
    session = engine.session()
    session.feed(IDS[:4])
    point = session.snapshot()
    first = session.feed(IDS[4:])
    session.restore(point)
    assert session.ids == IDS[:4]
    np.testing.assert_array_equal(session.feed(IDS[4:]), first)
    other = engine.session()
    other.restore(point)
    np.testing.assert_array_equal(other.feed(IDS[4:]), first)


def test_interleaved_sessions_do_not_disturb_each_other(engine):
    alone = [engine.session().feed(ids) for ids in (IDS, IDS[::-1])]
    left, right = engine.session(), engine.session()
    for a, b in zip(IDS, IDS[::-1], strict=True):
        logits = left.feed([a]), right.feed([b])
    for got, expected in zip(logits, alone, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_saved_session_continues_in_another_engine(engine, byte_model, tmp_path):
    session = engine.session()
    session.feed(IDS)
    session.save(tmp_path / "s.safetensors")
    with k3mlx.load(byte_model) as other:
        loaded = other.load_session(tmp_path / "s.safetensors")
        assert loaded.ids == IDS
        np.testing.assert_array_equal(loaded.feed([3]), session.feed([3]))


def test_empty_session_can_be_saved(engine, tmp_path):
    engine.session().save(tmp_path / "s.safetensors")
    loaded = engine.load_session(tmp_path / "s.safetensors")
    assert loaded.ids == []
    np.testing.assert_array_equal(loaded.feed(IDS), engine.session().feed(IDS))


def test_session_of_another_model_or_dtype_is_refused(engine, byte_model, tmp_path):
    path = tmp_path / "s.safetensors"
    engine.session().save(path)
    with k3mlx.load(byte_model, dtype="float64") as other, pytest.raises(UsageError, match="another model"):
        other.load_session(path)
    write_safetensors(path, {"ids": np.zeros(1, np.int64)}, {"k3mlx.session": engine.identity()})
    with pytest.raises(UsageError, match="does not fit this model"):
        engine.load_session(path)


def test_session_file_cut_short_is_refused(engine, tmp_path):
    path = tmp_path / "s.safetensors"
    engine.session().save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFilesError, match="truncated"):
        engine.load_session(path)


def test_cancellation_between_layers_leaves_the_session_as_it_was(engine):
    session = engine.session()
    session.feed(IDS[:3])
    asked = 0

    def should_stop():
        nonlocal asked
        asked += 1
        return asked == 3

    with pytest.raises(Cancelled, match="before layer 2"):
        session.feed(IDS[3:], should_stop=should_stop)
    assert asked == 3
    assert session.ids == IDS[:3]
    np.testing.assert_allclose(session.feed(IDS[3:]), engine.session().feed(IDS), atol=1e-5)


def test_cancelled_prompt_keeps_the_steps_that_were_finished(byte_model):
    with k3mlx.load(byte_model, prefill_step_size=4) as engine:
        session = engine.session()
        layers = iter(range(100))
        with pytest.raises(Cancelled):
            session.feed(IDS, should_stop=lambda: next(layers) == 5)  # four layers a step: in the second
        assert session.ids == IDS[:4]


@pytest.mark.parametrize("ids", [[], [-1], [512], [3, 600], "abc", None, 7, [1.5], [True], [[1, 2]], ["1"]])
def test_ids_that_cannot_be_fed(engine, ids):
    session = engine.session()
    with pytest.raises(UsageError, match="expected"):
        session.feed(ids)
    assert session.ids == []


def test_numpy_ids_are_ids(engine):
    np.testing.assert_array_equal(engine.session().feed(np.array(IDS)), engine.session().feed(IDS))


def test_a_closed_engine_says_so(byte_model):
    with k3mlx.load(byte_model) as engine:
        session = engine.session()
    with pytest.raises(UsageError, match="engine is closed"):
        session.feed([1])


def test_a_session_that_cannot_be_written(engine, tmp_path):
    session = engine.session()
    with pytest.raises(UsageError, match="is a folder"):
        session.save(tmp_path)
    with pytest.raises(K3Error, match="cannot be written"):
        session.save(tmp_path / "absent" / "s")


def test_context_limit(engine):
    session = engine.session()
    session.feed([1] * 499)
    session.feed([1])
    with pytest.raises(UsageError, match="501 tokens, expected at most 500"):
        session.feed([1])


def broken_model(folder, name, layer_key):
    rng = np.random.default_rng(3)
    config = random_config(rng, num_hidden_layers=5)
    tensors = random_tensors(config, rng)
    name = next(n for n in tensors if n.endswith(name) and layer_key in n)
    tensors[name] = np.full_like(tensors[name], np.nan)
    return write_model(folder, config, tensors)


@pytest.mark.parametrize(
    ("name", "key", "stage"),
    [
        ("o_proj.weight", "layers.2.", "layers.2.attention"),
        ("routed_expert_down_proj.weight", "layers.3.", "layers.3.moe"),
        ("norm.weight", "model.norm", "final_norm"),
    ],
)
def test_nan_weights_are_reported_with_position_and_layer(tmp_path, name, key, stage):
    with k3mlx.load(broken_model(tmp_path, name, key)) as engine:
        session = engine.session()
        with pytest.raises(K3Error, match=rf"not finite at positions 0 to 3; .* is {stage}"):
            session.feed([1, 2, 3, 4])
        assert session.ids == []


@pytest.mark.parametrize("experts", ["mxfp4", "plain"])
def test_cache_size_never_changes_a_bit(tmp_path, experts):
    rng = np.random.default_rng(8)
    write_random_model(tmp_path, random_config(rng, experts=experts), rng, experts=experts)
    outputs, reports = [], []
    for budget in ("auto", 0, 30_000, "60kB", 10**9):
        with k3mlx.load(tmp_path, expert_cache=budget) as engine:
            session = engine.session()
            rows = [session.feed([1, 2, 3, 4, 5], all_logits=True), session.feed([6]), session.feed([1])]
            outputs.append(np.concatenate([np.atleast_2d(row) for row in rows]))
            reports.append(engine.report()["experts"])
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])
    assert reports[0]["evictions"] == 0
    assert reports[1]["hits"] == 0
    assert reports[1]["bytes_read"] > reports[0]["bytes_read"]


def test_report_counts(engine):
    session = engine.session()
    session.feed(IDS)
    session.feed([1])
    session.feed([2])
    report = engine.report()
    assert (report["prompt_tokens"], report["decode_steps"], report["generated_tokens"]) == (7, 2, 0)
    assert (report["backend"], report["device"], report["dtype"]) == ("numpy", "cpu", "float32")
    assert report["seconds"].keys() == {
        "prefill", "decode", "attention", "router", "mlp", "experts", "expert_wait", "head", "other",
    }  # fmt: skip
    assert all(value >= 0 for value in report["seconds"].values())
    inside = sum(value for part, value in report["seconds"].items() if part not in ("prefill", "decode"))
    assert inside <= report["seconds"]["prefill"] + report["seconds"]["decode"] + 1e-3
    assert {part["part"]: part["calls"] for part in report["parts"]}["attn_res_mix"] == 3 * 9
    assert type(report["experts"]["bytes_read"]) is int
    assert report["peak_memory_bytes"] > 10**7
    json.dumps(report)


def test_text_needs_a_vocabulary_but_ids_do_not(tmp_path):
    rng = np.random.default_rng(1)
    write_random_model(tmp_path, random_config(rng), rng)
    with k3mlx.load(tmp_path) as engine:
        engine.session().feed([1, 2])
        with pytest.raises(ModelFilesError, match=r"tiktoken\.model"):
            k3mlx.generate(engine, prompt="x", max_tokens=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "cuda"}, UsageError, "backend is 'cuda'"),
        ({"dtype": "bfloat16", "backend": "numpy"}, UsageError, "dtype is 'bfloat16'"),
        ({"device": "gpu", "backend": "numpy"}, ResourceError, "device"),
        ({"expert_cache": "much"}, UsageError, "expert_cache is 'much'"),
        ({"expert_cache": -1}, UsageError, "expert_cache"),
        ({"prefill_step_size": 0}, UsageError, "prefill_step_size is 0"),
    ],
)
def test_load_options_that_cannot_be_used(byte_model, options, error, message):
    with pytest.raises(error, match=message):
        k3mlx.load(byte_model, **options)
