"""`k3mlx download`: the whole command against a server on loopback, Ctrl-C, and what the terminal shows."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3mlx.checkpoint.resume import download_command
from k3mlx.cli import main
from k3mlx.cli.download import DownloadProgress
from k3mlx.download import Meter
from k3mlx.download.places import bytes_of
from tests.hub_server import COMMIT, Cut, HubServer, Status, sha256
from tests.paths import NANO

SHARD = "model-00003-of-000004.safetensors"
LIMIT = 16 << 16  # bytes of the shard that are sent before a pause


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer.running(NANO) as running:
        yield running


def environment(server: HubServer, home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {
        **kept,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1,localhost",
        **more,
    }


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "k3mlx", "download", *map(str, words)]


def run(server: HubServer, home: Path, *words: str | Path, **more: str) -> subprocess.CompletedProcess:
    environ = environment(server, home, **more)
    return subprocess.run(command(*words), env=environ, capture_output=True, text=True)


def await_part(process: subprocess.Popen, folder: Path) -> None:
    """Wait until what the server sends of the shard is on disk."""
    partial = (
        folder / ".k3mlx" / f"{sha256((NANO / SHARD).read_bytes())}.{sha256(SHARD.encode())[:8]}.incomplete"
    )
    while bytes_of(partial) != LIMIT:
        assert process.poll() is None, "ended before it could be interrupted"
        time.sleep(0.01)


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_into_the_cache_of_the_environment(server: HubServer, tmp_path: Path) -> None:
    done = run(server, tmp_path, "org/name")
    folder = tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}\n"
    assert f"org/name at {COMMIT[:12]}: complete, 10 files, 9.37 MB; 9.37 MB received" in done.stderr
    assert (folder / SHARD).read_bytes() == (NANO / SHARD).read_bytes()
    (folder / SHARD).resolve().unlink()
    lacking = run(server, tmp_path, "org/name", HF_HUB_OFFLINE="1")
    size = (NANO / SHARD).stat().st_size
    assert lacking.returncode == 3
    assert (
        f"{folder / SHARD}: {size} of {size} bytes are missing, and HF_HUB_OFFLINE is set" in lacking.stderr
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")
def test_ctrl_c_keeps_what_came_and_the_command_of_the_message_goes_on(
    server: HubServer, tmp_path: Path
) -> None:
    folder, gate = tmp_path / "m", threading.Event()
    server.paused[SHARD] = (LIMIT, gate)
    words = ("org/name", "--local-dir", folder, "--max-workers", "1")
    process = subprocess.Popen(
        command(*words), env=environment(server, tmp_path), stderr=subprocess.PIPE, text=True
    )
    try:
        await_part(process, folder)
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
        gate.set()
    assert process.returncode == 130, text
    assert "the same command goes on from there" in text
    assert "Traceback" not in text
    server.paused.clear()
    again = download_command(folder).split()
    assert again[:3] == ["k3mlx", "download", "org/name"]
    done = run(server, tmp_path, *again[2:])
    assert done.returncode == 0, done.stderr
    assert server.sent_of(SHARD)[-1].start == LIMIT
    for file in NANO.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_a_kill_in_the_middle_is_gone_on_from(server: HubServer, tmp_path: Path) -> None:
    folder, gate = tmp_path / "m", threading.Event()
    server.paused[SHARD] = (LIMIT, gate)
    words = ("org/name", "--local-dir", folder)
    process = subprocess.Popen(command(*words), env=environment(server, tmp_path), stderr=subprocess.DEVNULL)
    try:
        await_part(process, folder)
    finally:
        process.kill()
        process.wait()
        gate.set()
    server.paused.clear()
    done = run(server, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert server.sent_of(SHARD)[-1].start == LIMIT
    assert (folder / SHARD).read_bytes() == (NANO / SHARD).read_bytes()


def test_exit_codes(server: HubServer, tmp_path: Path) -> None:
    assert main(["download", "no-repository"]) == 2
    assert main(["download", "org/name", "--local-dir", str(NANO / "config.json")]) == 2
    assert main(["download", "org/name", "--json", str(tmp_path / "no" / "x")]) == 2
    server.token = "hf_good"
    revoked = run(server, tmp_path, "org/name", HF_TOKEN="hf_revoked")
    assert revoked.returncode == 1
    assert "refused this token (401)" in revoked.stderr
    assert len(revoked.stderr.strip().splitlines()) == 1
    server.token = None
    server.faults["config.json"].append(Status(410))
    assert run(server, tmp_path, "org/name").returncode == 1


def test_the_folders_are_told(server: HubServer, tmp_path: Path) -> None:
    other = tmp_path / "other drive"
    words = ("org/name", "--local-dir", tmp_path / "m", "--dirs", other, "--json", tmp_path / "out.json")
    server.faults[SHARD].append(Cut(10))
    done = run(server, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert f"run it with: --model-dirs '{other}'" in done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["dirs"] == [str(other)]
    assert f"{SHARD}: " in done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_tells_rate_and_time_left() -> None:
    out, now, meter = Terminal(), [50.0], Meter()
    progress = DownloadProgress(out, lambda: now[0])
    meter.total, meter.done = 10**12, 4 * 10**11
    progress(meter)
    now[0] += 1
    meter.add(2, received=2)
    progress(meter)
    assert out.getvalue() == "", "two bytes say nothing of a rate"
    for _ in range(100):  # a second each at 100 MB/s, after one at 50 GB/s that the window forgets
        now[0] += 1
        meter.add(50 * 10**9 if now[0] == 52 else 10**8, received=50 * 10**9 if now[0] == 52 else 10**8)
        progress(meter)
    left = (10**12 - meter.done) / 10**8
    expected = f"460 GB of 1 TB, 46.0%, 100 MB/s, {int(left // 3600)} h {int(left % 3600 // 60)} min left"
    assert out.getvalue().split("\r")[-1].rstrip() == expected
    meter.note("something happened")
    progress(meter)
    assert out.getvalue().split("\r")[-1] == "something happened\n"
    now[0] += 31
    progress(meter)
    assert out.getvalue().split("\r")[-1].rstrip().endswith("0 B/s, waiting")
    progress.close()
    assert out.getvalue().endswith("\r")


def test_progress_of_hashing() -> None:
    out, now, meter = Terminal(), [50.0], Meter()
    progress = DownloadProgress(out, lambda: now[0])
    meter.total = meter.done = meter.to_hash = 10**12
    for _ in range(10):
        progress(meter)
        meter.add(hashed=10**9)
        now[0] += 1
    progress(meter)
    assert out.getvalue().split("\r")[-1].rstrip() == "hashing: 10 GB of 1 TB, 1.0%, 1 GB/s, 16 min 30 s left"
