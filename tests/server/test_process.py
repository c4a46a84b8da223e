"""`k3mlx serve` as a process: start, signals, exit codes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

import k3mlx.cli.serve
from k3mlx.cli.serve import served_name
from tests.server.conftest import until

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to send")


@posix
def test_start_answer_and_end(process):
    server = process()
    served = server.wait_ready()
    assert any("loading" in line for line in server.lines)
    assert served.chat(max_tokens=2).usage.completion_tokens <= 2
    code, seconds = server.end()
    assert code == 0
    assert seconds < 5


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_long_answer_within_five_seconds(process, number):
    server = process("--prefill-step-size", "1")
    served = server.wait_ready()
    stream = served.openai.completions.create(
        model="default", prompt="x" * 5000, max_tokens=900, temperature=0, stream=True
    )
    time.sleep(0.3)
    code, seconds = server.end(number)
    assert code == 0
    assert seconds < 5
    stream.close()


@posix
def test_an_answer_in_work_is_finished_first(process):
    server = process()
    served = server.wait_ready()
    stream = served.openai.completions.create(
        model="default", prompt="x", max_tokens=40, temperature=0, stream=True
    )
    next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
    assert server.process.wait(10) == 0


@posix
def test_who_waits_when_the_server_ends_is_told(process):
    server = process()
    served = server.wait_ready()
    first = served.openai.completions.create(
        model="default", prompt="x", max_tokens=480, temperature=0, stream=True
    )
    next(iter(first))
    request = {"model": "default", "prompt": "y", "max_tokens": 3, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=request) as second:
        until(lambda: served.metric("k3mlx_requests_waiting") == 1)
        server.process.send_signal(signal.SIGTERM)
        assert '"code":"stopped"' in "".join(second.iter_text())
    assert [chunk.choices[0].finish_reason for chunk in first][-1] in ("stop", "length")
    assert server.process.wait(10) == 0


@posix
def test_the_end_is_orderly_and_leaves_no_files(process, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = process("--session-memory", "0")
    server.wait_ready().chat(max_tokens=2)
    assert len(list(tmp_path.glob("k3mlx-sessions-*/*"))) >= 1
    assert server.end()[0] == 0
    assert list(tmp_path.iterdir()) == []
    assert not any("leaving" in line for line in server.lines)


@posix
def test_nobody_is_left_when_the_model_cannot_be_loaded(process, tmp_path):
    server = process(model=tmp_path)
    assert server.process.wait(20) == 3
    until(lambda: any("error" in line for line in server.lines))
    assert not any("Traceback" in line for line in server.lines)


def serve(*arguments):
    command = [sys.executable, "-m", "k3mlx", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = serve("--port", str(taken.getsockname()[1]))
    assert result.returncode == 2
    assert "cannot listen on 127.0.0.1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--max-queue", "0"], "--max-queue is 0"),
        (["--max-body", "big"], "max_body is 'big'"),
        (["--port", "70000"], "cannot listen"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
    ],
)
def test_bad_arguments(arguments, message):
    result = serve(*arguments)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert message in result.stderr


def test_a_long_load_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(k3mlx.cli.serve, "LOADING_SECONDS", 0.05)
    with k3mlx.cli.serve._still_loading("big"):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert re.fullmatch(r"big: loading for \d+ s, [\d.]+ .B in memory", lines[0])


def test_the_name_clients_use(tmp_path):
    assert served_name(None) == "k3-nano"
    assert served_name(str(tmp_path / "..")) == tmp_path.parent.name
    assert served_name("moonshotai/Kimi-K3") == "moonshotai/Kimi-K3"
