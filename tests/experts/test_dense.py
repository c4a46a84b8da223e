"""Dense weights that are read at each use: the same bits, and the bytes that the plan says."""

import threading
import time

import numpy as np
import pytest

import k3mlx
from k3mlx.checkpoint.safetensors import read_header
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.writer import to_bf16, write_safetensors
from k3mlx.dense import LayerRing, stored_sizes
from k3mlx.dense_memory import Arena, enough, padded
from k3mlx.dense_numpy import DenseReader
from k3mlx.dense_reads import DenseReads, Read, Work, into
from k3mlx.errors import K3Error, ModelFilesError
from k3mlx.governor import MemoryPlan, smallest_memory
from k3mlx.needs import backend_needs
from tests.tiny import random_config, write_random_model

from .models import deadline, nothing_left_behind

DTYPES = ("F32", "BF16")


@pytest.fixture(scope="module", params=DTYPES)
def folder(request, tmp_path_factory):
    rng = np.random.default_rng(21)
    config = random_config(rng, num_hidden_layers=6, hidden_size=61)
    return write_random_model(tmp_path_factory.mktemp("dense"), config, rng, dtype=request.param, shards=2)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tensors_are_read_as_the_checkpoint_reads_them(folder, direct, dtype):
    with nothing_left_behind(), Checkpoint.open(folder) as checkpoint:
        reader = DenseReader(checkpoint, 3, direct, dtype, streamed=(2, 4), at_once=1)
        for n in (2, 3, 4):
            layer = reader.layer(n)
            names = [name for name in checkpoint.tensors if name.startswith(f"model.layers.{n}.")]
            names = [name for name in names if ".experts." not in name]
            for name in names:
                np.testing.assert_array_equal(
                    layer.load(name, dtype), checkpoint.load(name, dtype), err_msg=name
                )
            reader.drop(n)
        other = {np.float32: np.float64, np.float64: np.float32}[dtype]
        with pytest.raises(K3Error, match="was loaded as float"):
            reader.layer(2).load(names[0].replace("layers.4", "layers.2"), other)
        reader.close()


@pytest.mark.parametrize("unit", [1, 7, 1000])
def test_a_tensor_of_many_pieces_arrives_whole(tmp_path, monkeypatch, unit):
    """At an odd place of its file, in pieces of whole units, each at most once."""
    monkeypatch.setattr("k3mlx.dense_reads.STAGING", 1)  # pieces as small as they get
    values = to_bf16(
        np.random.default_rng(1).standard_normal((unit * 3, 1_000_003 // unit)).astype(np.float32)
    )
    write_safetensors(tmp_path / "a", {"x": ("BF16", values[0, :7]), "y": ("BF16", values)})
    header = read_header(tmp_path / "a")
    got, firsts = np.full(values.shape, np.nan, np.float32), []
    put = into(got)

    def record(first, stored):
        firsts.append(first)
        put(first, stored)

    reads = DenseReads({tmp_path / "a": header.stamp}, 4, direct=True)
    reads.run(Work([Read(header.tensors["y"], record, unit)]))
    reads.close()
    np.testing.assert_array_equal(got, np.left_shift(values, 16, dtype=np.uint32).view(np.float32))
    assert len(firsts) == len(set(firsts)) > 4
    assert not any(first % unit for first in firsts)


def test_no_more_reads_at_once_than_threads_and_conversion_beside_them(tmp_path, monkeypatch):
    write_safetensors(tmp_path / "a", {str(n): ("F32", np.zeros(8, np.float32)) for n in range(12)})
    header = read_header(tmp_path / "a")
    reads = DenseReads({tmp_path / "a": header.stamp}, 2, direct=False)
    now, most, lock = {"reads": 0, "puts": 0}, {"reads": 0, "puts": 0}, threading.Lock()

    def busy(what):
        with lock:
            now[what] += 1
            most[what] = max(most[what], now[what])
        time.sleep(0.02)
        with lock:
            now[what] -= 1

    monkeypatch.setattr(reads._files, "read", lambda *_: busy("reads"))
    reads.run(Work([Read(info, lambda *_: busy("puts")) for info in header.tensors.values()]))
    reads.close()
    assert most["reads"] == 2
    assert most["puts"] > 0


def test_after_a_failure_nothing_is_read_any_more(tmp_path):
    write_safetensors(tmp_path / "a", {str(n): ("F32", np.zeros(8, np.float32)) for n in range(40)})
    header = read_header(tmp_path / "a")
    reads, done = DenseReads({tmp_path / "a": header.stamp}, 1, direct=False), []

    def put(first, stored):
        time.sleep(0.01)
        done.append(first)
        if len(done) == 3:
            raise ModelFilesError("a bad piece")

    with pytest.raises(ModelFilesError, match="a bad piece"):
        reads.run(Work([Read(info, put) for info in header.tensors.values()]))
    count = len(done)
    assert count < 40
    time.sleep(0.05)
    assert len(done) == count
    reads.close()


def test_an_arena_gives_every_byte_once_and_takes_all_back():
    rng = np.random.default_rng(0)
    arena, held = Arena(1 << 16), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            arena.give([held.pop(rng.integers(len(held)))])
        else:
            size = int(rng.integers(1, 9000))
            place = arena.take(size)
            if place is None:
                continue
            assert place.stop - place.start == padded(size) >= size
            assert 0 <= place.start < place.stop <= arena.size
            assert not [other for other in held if other.start < place.stop and place.start < other.stop]
            held.append(place)
    arena.give(held)
    assert arena.take(1 << 16) == (0, 1 << 16)
    assert arena.take(1) is None


@pytest.mark.parametrize("at_once", [2, 3])
def test_layers_of_the_released_proportions_go_round_a_region_that_is_enough(at_once):
    """Five layers, the first with three arrays as large as two thirds of any other layer."""
    usual = [352, 352, 352, 352, 352, 176, 176, 176, 7, 7, 1]
    layers = [[969, 969, 969, *usual[:5]], usual, usual, [90, 352, 352, 200, 12, *usual[5:]], usual]
    layers = [sorted((1000 * size for size in sizes), reverse=True) for sizes in layers]
    arena, held = Arena(enough(layers, at_once)), []
    for n in [0, 1, 2, 3, 4] * 20 + [0, 2, 4, 1, 3] * 20:
        if len(held) == at_once:
            arena.give(held.pop(0))
        held.append([arena.take(size) for size in layers[n]])
        assert None not in held[-1]


def test_layers_in_turn_stay_in_the_region(folder):
    """Two layers at a time, of different sizes, in the memory of the largest two, over several passes."""
    with Checkpoint.open(folder) as checkpoint:
        reader = DenseReader(checkpoint, 2, False, np.float32, streamed=range(6))
        outside = 0
        for n in [*range(6)] * 3:
            layer = reader.layer(n)
            outside += sum(
                not np.shares_memory(array, reader._region) and not name.endswith("A_log")
                for name, array in layer._arrays.items()
            )
            reader.drop((n - 1) % 6)
        assert outside == 0
        reader.close()


class Loads:
    def __init__(self, seconds=0.0):
        self.order, self.seconds = [], seconds

    def __call__(self, layer):
        def read():
            time.sleep(self.seconds)
            self.order.append(layer)
            return f"layer {layer}"

        return read


@pytest.mark.parametrize("resident", [(), (0, 3), (4,), (0, 1, 3), (0, 1, 2, 3, 4)])
def test_a_ring_gives_every_layer_in_turn_and_reads_one_ahead(resident):
    with deadline(10):
        loads = Loads()
        ring = LayerRing(loads, [10] * 5, resident)
        for _ in range(3):
            assert list(ring) == [f"layer {n}" for n in range(5)]
        ring.close()
        assert loads.order[: len(resident)] == sorted(resident)
        streamed = [n for n in range(5) if n not in resident]
        rest = loads.order[len(resident) :]
        assert rest == (streamed * 4)[: len(rest)]
        assert 3 * len(streamed) <= len(rest) <= 3 * len(streamed) + 1
        assert not [t for t in threading.enumerate() if t.name.startswith("k3mlx-ahead")]


def test_a_layer_may_be_looked_at_twice_and_a_pass_may_begin_anew():
    loads = Loads()
    ring = LayerRing(loads, [10] * 4, (1,))
    assert (ring[0], ring[0], ring[1], ring[2], ring[2]) == (
        "layer 0", "layer 0", "layer 1", "layer 2", "layer 2",
    )  # fmt: skip
    assert ring[0] == "layer 0"  # the pass was abandoned before layer 3
    assert list(ring) == [f"layer {n}" for n in range(4)]
    assert ring.resident(1) == "layer 1"
    assert ring.resident(0) is None
    with pytest.raises(IndexError):
        ring[4]
    ring.close()


def test_a_layer_is_given_back_when_the_next_one_is_asked_for():
    dropped = []
    ring = LayerRing(Loads(), [10] * 4, (1,), dropped.append)
    for layer, expected in ((0, []), (0, []), (1, []), (2, [0]), (3, [0, 2]), (0, [0, 2, 3])):
        ring[layer]
        assert dropped == expected
    ring[3]  # the pass was abandoned: layer 2 had been read for nothing, or its read had not begun
    assert [layer for layer in dropped if layer != 2] == [0, 3, 0]
    assert ring.report()["bytes_read"] >= 50
    ring.close()


def test_the_next_layer_is_read_while_this_one_is_used():
    loads = Loads(0.05)
    ring = LayerRing(loads, [10] * 4, ())
    assert ring[0] == "layer 0"
    time.sleep(0.2)
    with deadline(0.04):
        assert ring[1] == "layer 1"
    ring.close()


def test_an_error_is_raised_where_the_layer_is_used_and_only_then():
    failing = [True]

    def load(layer):
        if layer == 2 and failing:
            raise ModelFilesError("layer 2 is gone")
        return layer

    dropped = []
    ring = LayerRing(lambda layer: lambda: load(layer), [10] * 3, (), dropped.append)
    assert (ring[0], ring[1]) == (0, 1)
    with pytest.raises(ModelFilesError, match="gone"):
        ring[2]
    assert dropped == [0, 1, 2]  # also what it had been given
    failing.clear()
    assert list(ring) == [0, 1, 2]
    ring.close()


def run(folder, backend="numpy", **options):
    with k3mlx.load(
        folder, backend=backend, prefill_step_size=4, warm_start="off", lookahead="off", **options
    ) as engine:
        session = engine.session()
        rows = [session.feed([1, 2, 3, 4, 5, 6, 7], all_logits=True)]
        rows += [session.feed([n])[None] for n in (3, 9)]
        return np.concatenate(rows), engine.report(), engine.governor.plan


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("numpy", "float32"), ("numpy", "float64"), ("mlx", "float32"), ("mlx", "bfloat16")],
)
def test_streamed_layers_change_no_bit_and_cost_what_the_plan_says(folder, backend, dtype, monkeypatch):
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="mlx is not installed")
    options = {"backend": backend, "device": "cpu", "dtype": dtype}
    whole, report, plan = run(folder, **options, memory="4GB", expert_cache=10**8)
    assert len(plan.resident) == 6
    assert report["dense"]["bytes_read"] == 0
    with Checkpoint.open(folder) as checkpoint:
        stored = [
            sum(
                info.nbytes
                for name, info in checkpoint.tensors.items()
                if name.startswith(f"model.layers.{n}.") and ".experts." not in name
            )
            for n in range(6)
        ]
        plan_bytes = stored_sizes(checkpoint)
    for resident in ((), (1, 4), (0, 2, 4, 5)):
        fixed = MemoryPlan(**(vars(plan) | {"resident": resident}))
        monkeypatch.setattr("k3mlx.engine.plan_memory", lambda *_, fixed=fixed: fixed)
        with deadline(60), nothing_left_behind():
            got, report, _ = run(folder, **options, memory="4GB", expert_cache=10**8)
        np.testing.assert_array_equal(got, whole)
        a_pass = sum(size for n, size in enumerate(stored) if n not in resident)
        ahead = max(size for n, size in enumerate(stored) if n not in resident)
        passes = 4
        read = report["dense"]["bytes_read"]
        assert a_pass == sum(size for n, size in enumerate(plan_bytes) if n not in resident)
        assert passes * a_pass <= read <= passes * a_pass + ahead  # and one layer ahead of a pass to come


def test_the_smallest_memory_of_a_model_loads_it(folder):
    """Everything but the process itself is small here; the refusal names a budget that works."""
    from k3mlx.devices import choose

    with Checkpoint.open(folder) as checkpoint:
        needs = backend_needs(choose("numpy", "cpu"), checkpoint, "float32")
        least = smallest_memory(needs) + (8 << 20)  # the process may have grown a little since
    with pytest.raises(k3mlx.errors.ResourceError, match="expected at least"):
        k3mlx.load(folder, backend="numpy", memory=needs.process)
    logits, report, plan = run(folder, memory=least)
    assert plan.memory == least
    assert np.isfinite(logits).all()
    assert report["memory"]["memory"] == least
