"""Servers for tests: one whose model says what a test wants, one that is a process of its own."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
import openai
import pytest

import k3mlx
from k3mlx.server.app import Settings
from k3mlx.server.requests import Limits
from k3mlx.server.run import listen, make_server
from k3mlx.server.worker import Worker

os.environ["NO_PROXY"] = "127.0.0.1"  # whatever proxy this machine has, it is not for these servers


@pytest.fixture(scope="session")
def roomy_model(byte_model, tmp_path_factory):
    """The random model with a context of 6000."""
    folder = tmp_path_factory.mktemp("roomy") / "random"
    shutil.copytree(byte_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 6000
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Fed:
    """The state of the scripted model: what it has been fed."""

    ids: tuple[int, ...] = ()

    def memory(self):
        return {id(self): 1000}


class Scripted:
    """Stands in for a backend: answers with the script of the key that was mentioned last."""

    def __init__(self, engine, answers: dict[str, str | list[int]]) -> None:
        self.inner = engine.backend
        self.tokenizer = engine.tokenizer
        self.answers = answers
        self.layer_seconds = 0.0
        self.layers = 0  # layers begun so far
        self.fed: list[int] = []  # ids of each pass

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def new_state(self):
        return Fed()

    def export_state(self, state):
        return {"fed": np.array(state.ids, np.int64)}

    def import_state(self, arrays, length):
        return Fed(tuple(arrays["fed"].tolist()))

    def forward(self, ids: Sequence[int], state: Fed, all_logits, hooks):
        for layer in range(self.config.num_hidden_layers):
            hooks.before_layer(layer)
            self.layers += 1
            time.sleep(self.layer_seconds)
        self.fed.append(len(ids))
        known = state.ids + tuple(ids)
        logits = np.zeros(self.config.vocab_size, np.float32)
        logits[self.next_id(known)] = 20
        return logits, Fed(known)

    def next_id(self, known: tuple[int, ...]) -> int:
        text = self.tokenizer.decode(known)
        key = max(self.answers, key=text.rfind)
        script = self.answers[key]
        if isinstance(script, str):
            script = self.tokenizer.encode(script, allow_special=True)
        done = next(n for n in range(len(script) - 1, -1, -1) if known[len(known) - n :] == tuple(script[:n]))
        return script[done]


class Served:
    """A running server: clients, and the backend behind it if it runs in this process."""

    def __init__(self, url: str, backend=None, worker=None) -> None:
        self.url = url
        self.backend = backend
        self.worker = worker
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def chat(self, text="hi", **options):
        """An answer of the official client."""
        options = {"temperature": 0, **options}
        messages = options.pop("messages", [{"role": "user", "content": text}])
        return self.openai.chat.completions.create(model="default", messages=messages, **options)

    def post(self, path="/v1/chat/completions", **body):
        return self.http.post(path, content=json.dumps(body))

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])

    def close(self) -> None:
        self.http.close()
        self.openai.close()


@contextlib.contextmanager
def in_process(open_engine, *, keep_disk_bytes=0, keep_bytes=1 << 30, queue_limit=64, wait=True, **settings):
    """A server in a thread of this process; `open_engine` runs in the worker."""
    settings = {"model": "test", "hosts": frozenset(("127.0.0.1", "localhost")), **settings}
    worker = Worker(
        open_engine, queue_limit=queue_limit, keep_bytes=keep_bytes, keep_disk_bytes=keep_disk_bytes
    )
    server = make_server(worker, Settings(**settings))
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    worker.start()
    thread.start()
    served = Served(f"http://127.0.0.1:{bound.getsockname()[1]}", worker=worker)
    try:
        until(lambda: server.started and not (wait and worker.state == "loading"))
        served.backend = worker.engine.backend if worker.engine else None
        yield served
    finally:
        server.should_exit = True
        worker.stop()
        thread.join(20)
        worker.join(20)
        bound.close()
        served.close()
    assert not thread.is_alive()
    assert not worker.is_alive()


@pytest.fixture
def scripted(roomy_model):
    """A function that starts a server whose model says the given text, or the text of the key it was told."""
    with contextlib.ExitStack() as stack:

        def start(answers, **options):
            def open_engine():
                engine = k3mlx.load(roomy_model)
                engine.backend = Scripted(engine, {"": answers} if isinstance(answers, str) else answers)
                return engine

            return stack.enter_context(in_process(open_engine, **options))

        yield start


@pytest.fixture
def random_server(roomy_model):
    """A server in this process with the random model."""
    with in_process(
        lambda: k3mlx.load(roomy_model), limits=Limits(body_bytes=1_000_000, max_tokens=4)
    ) as served:
        yield served


class Process:
    """`k3mlx serve` as a process of its own."""

    def __init__(self, model, *arguments: str) -> None:
        self.started = time.monotonic()
        command = [sys.executable, "-m", "k3mlx", "serve", "--port", "0", *arguments]
        if model is not None:
            command += ["--model", str(model)]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        until(lambda: self._url() or self.process.poll() is not None)
        self.served = Served(self._url()) if self._url() else None

    def wait_ready(self):
        until(lambda: any(": ready at" in line for line in self.lines) or self.process.poll() is not None)
        assert self.process.poll() is None, self.lines
        return self.served

    def end(self, number=signal.SIGTERM) -> tuple[int, float]:
        """Send a signal; the exit code and the seconds it took."""
        started = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(20)
        return code, time.monotonic() - started

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        if self.served:
            self.served.close()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)

    def _url(self) -> str | None:
        found = re.search(r"http://[0-9.:]+", "".join(self.lines))
        return found[0] if found else None


@pytest.fixture
def process(roomy_model):
    """A function that starts `k3mlx serve` with the random model, or with another."""
    started: list[Process] = []

    def start(*arguments, model=roomy_model):
        started.append(Process(model, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def until(condition, seconds: float = 30) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this did not happen in time"
        time.sleep(0.01)
