"""The scripts for measuring: slices that load, traces with the published locality, a table that is right."""

import json

import numpy as np
import pytest

import k3mlx
from k3mlx.bench.dense import compare_dense
from k3mlx.bench.streaming import compare_decode, compare_rates, measure_prompt
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.errors import UsageError
from k3mlx.experts.trace import TraceWriter
from k3mlx.governor import MemoryPlan
from tests.paths import DATA, needs_data
from tests.scripts_at import script

make_slice, replay = script("make_slice"), script("replay_cache")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A slice with widths divided by 16: three layers, twenty experts."""
    folder = tmp_path_factory.mktemp("slice")
    make_slice.main([str(folder), "--layers", "3", "--experts", "20", "--vocab", "300", "--width", "16"])
    return folder


def test_a_slice_is_a_checkpoint_of_the_released_form(narrow):
    shards = sorted(path.name for path in narrow.glob("*.safetensors"))
    assert shards == [f"model-0000{n}-of-000004.safetensors" for n in (1, 2, 3, 4)]
    with Checkpoint.open(narrow) as checkpoint:
        assert checkpoint.mxfp4
        assert checkpoint.config.layer_kinds == ("kda", "kda", "mla")
        assert [len(checkpoint.expert_spans(2, e)) for e in range(20)] == [1] * 20
        offsets = [checkpoint.expert_tensors(1, e)["w1.weight_packed"].offset for e in range(20)]
        assert offsets != sorted(offsets)
        total = sum(path.stat().st_size for path in narrow.glob("*.safetensors"))
        index = json.loads((narrow / "model.safetensors.index.json").read_text())
        assert 0 < total - index["metadata"]["total_size"] < 60_000
    with k3mlx.load(narrow, backend="numpy") as engine:
        logits = engine.session().feed([1, 2, 3])
        assert np.isfinite(logits).all()
        assert logits.std() > 0.1


@needs_data
def test_the_released_widths():
    released = json.loads((DATA / "config.json").read_text())["text_config"]
    ours = make_slice.slice_config(93, 896, 163840)["text_config"]
    own = {
        "linear_attn_config",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "quantization_config",
        "dtype",
    }
    for name in ours.keys() - own:
        if name in released:
            assert ours[name] == released[name], name
    for name, value in make_slice.LINEAR.items():
        assert released["linear_attn_config"].get(name, value) == value


@pytest.mark.parametrize("seed", range(6))
def test_synthetic_traces_have_the_published_locality(seed):
    last, two, top = replay.locality(replay.synthetic(seed, layers=3, tokens=250))
    assert 0.30 <= last <= 0.36
    assert 0.42 <= two <= 0.48
    assert 0.18 <= top <= 0.24


def test_the_table_of_a_trace_that_can_be_counted(tmp_path, capsys):
    path = tmp_path / "known.trace"
    writer = TraceWriter(path, 4, 1)
    for expert in (0, 1, 2, 0, 1, 2, 0, 1, 2):  # a loop over three
        writer.record(1, np.array([[expert]]))
    writer.close()
    replay.main([str(path), "--budgets", "0.5", "0.75", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["known", "50.00%", "0.0000"]
    assert lines[1].split()[-1] == "0.3333"
    assert lines[2].split()[2:] == ["0.6667"] * 4
    assert lines[3].split()[2:] == ["0.6667"] * 4


def test_misses_are_those_of_a_store(tmp_path):
    """The replay and the store count the same misses for the same routing."""
    folder = tmp_path / "slice"
    make_slice.main([str(folder), "--layers", "3", "--experts", "20", "--vocab", "300", "--width", "16"])
    trace = tmp_path / "trace"
    with k3mlx.load(
        folder, backend="numpy", lookahead="off", prefill_step_size=1, expert_trace=trace,
        expert_cache=20 * k3mlx.experts.layout.ExpertLayout(Checkpoint.open(folder)).payload,
    ) as engine:  # fmt: skip
        engine.session().feed(list(range(30)))
        misses = engine.report()["experts"]["misses"]
        capacity = engine.backend.store.capacity
    loaded = replay.load(trace)
    accesses = list(replay._accesses(loaded.routings))
    assert replay._misses(replay.POLICIES["lru"](capacity), accesses, capacity) == misses


def test_the_measurements_run(narrow):
    options = {"backend": "numpy", "io_threads": 2, "direct_io": "off", "memory": "auto", "warm_start": "off"}
    with k3mlx.load(narrow, **options, prefill_step_size=64) as engine:
        rate = compare_rates(engine.backend.store, 1)
        decode = compare_decode(engine, 1)
    assert rate["ratio"] == pytest.approx(rate["store_bytes_per_second"] / rate["probe_bytes_per_second"])
    assert decode["read"] > 0
    assert decode["predicted"] >= decode["dense"]
    whole = measure_prompt(str(narrow), options, 40, 40)
    assert whole["exact"]
    assert whole["hits"] == 0
    assert whole["bytes_read"] == whole["distinct_experts_of_passes"] * whole["expert_bytes"]
    assert measure_prompt(str(narrow), options, 40, 8)["bytes_read"] > whole["bytes_read"]


def test_dense_weights_beside_plain_reads(narrow, monkeypatch):
    """Bytes of a step are those of the layers that are not resident and of the experts that it found missing."""
    with k3mlx.load(narrow, backend="numpy") as engine, Checkpoint.open(narrow) as checkpoint:
        with pytest.raises(UsageError, match="all dense weights are in memory"):
            compare_dense(engine, checkpoint, 1)
        plan = engine.governor.plan
    fixed = MemoryPlan(**(vars(plan) | {"resident": (1,), "cache": 0}))
    monkeypatch.setattr("k3mlx.engine.plan_memory", lambda *_: fixed)
    with (
        k3mlx.load(narrow, backend="numpy", warm_start="off") as engine,
        Checkpoint.open(narrow) as checkpoint,
    ):
        found = compare_dense(engine, checkpoint, 2)
        layers = [
            sum(
                i.nbytes
                for name, i in checkpoint.tensors.items()
                if f".layers.{n}." in name and ".experts." not in name
            )
            for n in (0, 2)
        ]
        assert found["streamed_layers"] == 2
        for read in found["dense_bytes"]:
            assert (
                sum(layers) - max(layers) <= read <= sum(layers) + max(layers)
            )  # one may be on the way at both ends
        payload = engine.backend.store.payload
        assert all(
            size % payload == 0 and 16 * payload <= size <= 32 * payload for size in found["expert_bytes"]
        )
        assert found["ratio"] == pytest.approx(np.median(found["ratios"]), abs=1e-3)
