"""Disks that fail, files that change, Ctrl-C, two processes: the right error or the right output, and no hang."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import k3mlx
from k3mlx import machine
from k3mlx.errors import ModelFilesError
from k3mlx.experts import files as files_module

from .models import deadline, nothing_left_behind

PROMPT = [5, 9, 2, 60, 11]
OPTIONS = {
    "backend": "numpy",
    "prefill_step_size": 5,
    "warm_start": "off",
    "expert_cache": 0,
    "io_threads": 3,
}


def expert_reads(patch, fault):
    """Have `fault(number)` happen before each read of experts, counted from 0; dense reads stay as they are."""
    whole, lock, count = os.preadv, threading.Lock(), [0]

    def read(descriptor, buffers, offset):
        if threading.current_thread().name.startswith("k3mlx-read"):
            with lock:
                number, count[0] = count[0], count[0] + 1
            fault(number)
        return whole(descriptor, buffers, offset)

    patch.setattr(files_module.os, "preadv", read)
    return count


def fail(number):
    raise OSError(5, "Input/output error")


@pytest.fixture(scope="module")
def expected(packed_folder):
    with k3mlx.load(packed_folder, **OPTIONS) as engine:
        session = engine.session()
        return session.feed(PROMPT), session.feed([3])


@pytest.fixture
def copy(packed_folder, tmp_path):
    return shutil.copytree(packed_folder, tmp_path / "copy")


@pytest.mark.parametrize("direct", ["on", "off"])
def test_one_read_fails_in_a_run(packed_folder, expected, monkeypatch, direct):
    def fault(number):
        if number in (2, 9):
            fail(number)

    with (
        deadline(20),
        nothing_left_behind(),
        k3mlx.load(packed_folder, **OPTIONS, direct_io=direct) as engine,
    ):
        expert_reads(monkeypatch, fault)
        session = engine.session()
        np.testing.assert_array_equal(session.feed(PROMPT), expected[0])
        np.testing.assert_array_equal(session.feed([3]), expected[1])
        assert engine.report()["experts"]["retries"] == 2


@pytest.mark.parametrize("direct", ["on", "off"])
def test_all_reads_fail_and_the_session_goes_on_when_they_work_again(
    packed_folder, expected, monkeypatch, direct
):
    with (
        deadline(20),
        nothing_left_behind(),
        k3mlx.load(packed_folder, **OPTIONS, direct_io=direct) as engine,
    ):
        session = engine.session()
        with monkeypatch.context() as patch:
            expert_reads(patch, fail)
            for _ in range(3):
                with pytest.raises(ModelFilesError, match=r"\(layer 1, expert \d, tried twice\)"):
                    session.feed(PROMPT)
            assert session.ids == []
            while engine.backend.store.reading:
                time.sleep(0.001)
        np.testing.assert_array_equal(session.feed(PROMPT), expected[0])
        np.testing.assert_array_equal(session.feed([3]), expected[1])


@pytest.mark.parametrize("direct", ["on", "off"])
def test_a_file_cut_in_mid_run(copy, expected, direct):
    with deadline(20), nothing_left_behind(), k3mlx.load(copy, **OPTIONS, direct_io=direct) as engine:
        session = engine.session()
        np.testing.assert_array_equal(session.feed(PROMPT), expected[0])
        shards = sorted(copy.glob("*.safetensors"))
        for shard in shards:
            os.truncate(shard, shard.stat().st_size // 2)
        with pytest.raises(
            ModelFilesError, match=r"safetensors: (ends at byte|changed since).*layer \d, expert"
        ):
            session.feed([3])
        assert session.ids == PROMPT


def test_a_file_rewritten_in_mid_run(copy, expected):
    with deadline(20), nothing_left_behind(), k3mlx.load(copy, **OPTIONS) as engine:
        session = engine.session()
        session.feed(PROMPT)
        for shard in copy.glob("*.safetensors"):
            with open(shard, "r+b") as file:
                file.seek(-10, os.SEEK_END)
                file.write(b"0123456789")
            os.utime(shard, ns=(1, 1))
        with pytest.raises(ModelFilesError, match=r"changed since the model was opened.*layer \d, expert"):
            session.feed([3])


def test_files_replaced_or_deleted_in_mid_run_are_read_as_they_were(copy, expected):
    with deadline(20), nothing_left_behind(), k3mlx.load(copy, **OPTIONS) as engine:
        session = engine.session()
        np.testing.assert_array_equal(session.feed(PROMPT), expected[0])
        with engine.backend.store.request(1, range(9)) as request:  # every shard with experts is open now
            list(request.groups())
        list(engine.backend.store.fetch(2, range(9)))
        list(engine.backend.store.fetch(3, range(9)))
        first, *rest = sorted(copy.glob("*.safetensors"))
        (copy / "new").write_bytes(bytes(first.stat().st_size))
        os.replace(copy / "new", first)
        for shard in rest:
            shard.unlink()
        np.testing.assert_array_equal(session.feed([3]), expected[1])


def test_a_disk_whose_reads_take_two_seconds(packed_folder, expected, monkeypatch):
    def fault(number):
        if number < 3:
            time.sleep(2)

    with deadline(30), nothing_left_behind(), k3mlx.load(packed_folder, **OPTIONS) as engine:
        expert_reads(monkeypatch, fault)
        session = engine.session()
        np.testing.assert_array_equal(session.feed(PROMPT), expected[0])
        report = engine.report()
        assert report["experts"]["wait_seconds"] > 1.5
        assert report["experts"]["read_seconds"] > 1.5
        assert report["seconds"]["expert_wait"] == report["experts"]["wait_seconds"]


def test_a_run_stopped_between_layers_of_a_slow_disk(packed_folder, expected, monkeypatch):
    with deadline(20), nothing_left_behind(), k3mlx.load(packed_folder, **OPTIONS) as engine:
        with monkeypatch.context() as patch:
            count = expert_reads(patch, lambda number: time.sleep(0.05))
            session = engine.session()
            with pytest.raises(k3mlx.engine.Cancelled):
                session.feed(PROMPT, should_stop=lambda: count[0] > 0)
        np.testing.assert_array_equal(session.feed(PROMPT), expected[0])


INTERRUPTED = """
import os, sys, threading, time
import k3mlx
from k3mlx.experts import files

whole = os.preadv
def slow(descriptor, buffers, offset):
    if threading.current_thread().name.startswith("k3mlx-read"):
        os.write(1, b"reading\\n")
        time.sleep(1)
    return whole(descriptor, buffers, offset)

with k3mlx.load(sys.argv[1], backend="numpy", expert_cache=0, warm_start="off") as engine:
    files.os.preadv = slow
    session = engine.session()
    try:
        session.feed([5, 9, 2, 60, 11])
    except KeyboardInterrupt:
        files.os.preadv = whole
        assert session.ids == []
        logits = session.feed([5, 9, 2, 60, 11])
        print("after", float(logits.sum()), flush=True)
left = [t.name for t in threading.enumerate() if t.name.startswith("k3mlx-")]
print("left", left, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_with_reads_in_flight(packed_folder, expected):
    command = [sys.executable, "-c", INTERRUPTED, str(packed_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "reading\n"
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    lines = [line for line in out.splitlines() if line != "reading"]
    assert process.returncode == 0
    assert lines == [f"after {float(expected[0].sum())}", "left []"]


BESIDE = """
import json, sys
import k3mlx
with k3mlx.load(sys.argv[1], backend="numpy", expert_cache=0, prefill_step_size=5) as engine:
    session = engine.session()
    for _ in range(20):
        session = engine.session()
        logits = session.feed([5, 9, 2, 60, 11])
    print(json.dumps([logits.tolist(), session.feed([3]).tolist()]))
"""


def test_two_processes_on_one_snapshot(packed_folder, expected, tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BESIDE, str(packed_folder)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            for got, wanted in zip(json.loads(out), expected, strict=True):
                np.testing.assert_array_equal(np.array(got, np.float32), wanted)
    finally:
        for process in processes:
            process.kill()


def test_memory_squeezed_in_mid_run(packed_folder, expected):
    """An injected signal of pressure: the cache shrinks, says so, and the run goes on as if nothing was."""
    level, now = [0], [0.0]
    with nothing_left_behind(), k3mlx.load(packed_folder, **OPTIONS | {"expert_cache": "auto"}) as engine:
        governor, store = engine.governor, engine.backend.store
        governor._pressure, governor._footprint = (lambda: level[0]), (lambda: 0)
        governor._clock = lambda: now[0]
        session = engine.session()
        np.testing.assert_array_equal(session.feed(PROMPT), expected[0])
        before = engine.report()["experts"]
        level[0], now[0] = machine.CRITICAL, 1e9
        np.testing.assert_array_equal(session.feed([3]), expected[1])
        after = engine.report()
        assert after["experts"]["cache_bytes"] < before["cache_bytes"]
        assert after["memory"]["shrinks"] == 1
        assert len(store.entries) <= store.capacity
        level[0] = 0
        now[0] = 2e9
        session.feed([4])
        assert engine.report()["experts"]["cache_bytes"] == after["experts"]["cache_bytes"]
