"""What is switched off after which failure, with the message that MLX gives; no GPU is needed for the decision."""

import logging

import mlx.core as mx
import pytest

from k3mlx.errors import K3Error
from k3mlx.kernels import Kernels
from k3mlx.model.moe import ExpertStreams
from k3mlx.model.room import STEMS, EndOfRun, Room
from k3mlx.watchdog import Watchdog

METAL_FAULT = "RuntimeError: [METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002)"
CUDA_FAULT = "RuntimeError: CUDA error: an illegal memory access was encountered"
COMPILE = (
    "RuntimeError: [metal::Device] Unable to build metal library from source, kernel custom_kernel_{}_float"
)


class Maker:
    """Stands for a GPU whose kernels are never launched here."""

    name = "metal"


@pytest.fixture
def room_on():
    def build(kind, experts_kind="cpu", kernels=True):
        streams = ExpertStreams(mx.cpu, 2, group=2)
        room = Room("cpu", Kernels(Maker() if kernels else None), streams, experts_kind, Watchdog())
        room.kind = room.first_kind = kind  # decisions only: the streams are the CPU's
        room.begin()
        return room

    return build


def launched(room, *stems):
    for stem in stems:
        room.kernels.counters[stem].calls += 1


def disabled(room):
    return set(room.kernels.disabled)


def failures(room):
    formats = dict.fromkeys(("kda", "mla", "attn_res_mix", "dense_mlp", "router", "experts", "head"), "x")
    return {row["part"]: row["failures"] for row in room.report(formats) if row["failures"]}


def test_a_kernel_that_does_not_compile_falls_to_plain_operations_on_the_gpu(room_on, caplog):
    room = room_on("metal")
    room.enter("kda")
    room.enter("router")
    launched(room, "kda_step", "attn_res_mix", "route_topk")
    room._evaluating = True
    with caplog.at_level(logging.WARNING, "k3mlx"):
        room.recover(COMPILE.format("kda_step"))
    assert (room.kind, disabled(room), failures(room)) == ("metal", {"kda_step"}, {"kda": 1})
    assert len(caplog.messages) == 1
    assert "kda_step failed on metal" in caplog.messages[0]
    assert "plain operations instead" in caplog.messages[0]


def test_a_kernel_that_cannot_be_launched_is_the_one_being_built(room_on):
    room = room_on("metal")
    launched(room, "attn_res_mix")
    room.enter("router")
    room.recover("ValueError: bad template value")
    assert (room.kind, disabled(room), failures(room)) == ("metal", {"route_topk"}, {"router": 1})


def test_an_error_that_names_nobody_switches_off_what_was_launched(room_on):
    room = room_on("metal")
    room.enter("router")
    launched(room, "kda_prefill", "route_topk")
    room._evaluating = True
    room.recover("RuntimeError: something went wrong")
    assert disabled(room) == {"kda_prefill", "route_topk"}
    assert failures(room) == {"kda": 1}


def test_an_execution_fault_on_metal_ends_on_the_cpu(room_on):
    room = room_on("metal", experts_kind="metal")
    room.enter("kda")
    launched(room, "kda_step")
    room._evaluating = True
    room.recover(METAL_FAULT)
    assert room.kind == "cpu"
    assert disabled(room) == {stem for stems in STEMS.values() for stem in stems}
    assert failures(room) == {"kda": 1}
    assert room.experts_kind == "cpu"  # they were on the GPU
    room.enter("experts")
    assert room.fallbacks["experts"] == 1
    room.enter("mla")
    assert room.fallbacks["mla"] == 1


def test_an_execution_fault_on_cuda_ends_the_run(room_on):
    room = room_on("cuda")
    room.enter("kda")
    launched(room, "kda_step")
    room._evaluating = True
    with pytest.raises(EndOfRun, match="CUDA cannot go on"):
        room.recover(CUDA_FAULT)


def test_plain_operations_that_fail_on_the_gpu_go_to_the_cpu(room_on):
    room = room_on("metal", kernels=False)
    room.enter("mla")
    room._evaluating = True
    room.recover("RuntimeError: [metal::malloc] Attempting to allocate 99 bytes")
    assert room.kind == "cpu"
    assert failures(room) == {"mla": 1}
    assert room.experts is not None


def test_experts_that_fail_on_the_cpu_go_to_numpy(room_on):
    room = room_on("metal")
    launched(room, "kda_step")
    room.evaluate("layer 1: attention and router", [], 60)
    room.enter("experts")
    room._evaluating = True
    room.recover("RuntimeError: [quantized_matmul] something")
    assert (room.kind, room.experts, disabled(room)) == ("metal", None, set())
    assert failures(room) == {"experts": 1}


def test_experts_that_fail_on_the_gpu_go_to_the_streams_of_the_cpu(room_on):
    room = room_on("cuda", experts_kind="cuda")
    room.enter("experts")
    room._evaluating = True
    room.recover("RuntimeError: [quantized_matmul] No implementation for problem shape: 1x40x32x1")
    assert (room.kind, room.experts_kind, len(room.experts.streams)) == ("cuda", "cpu", 1)
    assert failures(room) == {"experts": 1}
    room.enter("experts")
    room._evaluating = True
    room.recover("RuntimeError: again")
    assert room.experts is None


def test_experts_that_fail_on_the_gpu_go_to_the_host_where_it_has_kernels_of_its_own():
    room = Room(
        "cpu",
        Kernels(None),
        ExpertStreams(mx.cpu, 1, group=2),
        "metal",
        Watchdog(),
        cpu_streams=0,
        host="C kernels",
    )
    room.kind = room.first_kind = "metal"
    room.enter("experts")
    assert room.fallbacks["experts"] == 0
    room._evaluating = True
    room.recover("RuntimeError: [quantized_matmul] something")
    assert (room.kind, room.experts, room.experts_kind) == ("metal", None, "cpu")
    row = next(row for row in room.report({"experts": "mxfp4"}))
    assert (row["device"], row["kernel"], row["failures"]) == ("cpu", "C kernels", 1)
    room.enter("experts")
    assert room.fallbacks["experts"] == 1


def test_nothing_left_is_an_error(room_on):
    room = room_on("cpu", kernels=False)
    room.enter("mla")
    with pytest.raises(K3Error, match="nothing is left to fall back on: RuntimeError: no"):
        room.recover("RuntimeError: no")


def test_a_stream_that_keeps_failing_ends_the_run(room_on, monkeypatch):
    room = room_on("metal")
    room.enter("mla")

    def fail(stream):
        raise RuntimeError("again")

    monkeypatch.setattr(mx, "synchronize", fail)
    with pytest.raises(EndOfRun, match="keeps failing"):
        room.recover("RuntimeError: no")
