"""What a hostile or broken client can send, and what the server says to it."""

import json
import random
import socket
import time

import pytest

from k3mlx.server import guard, metrics, protocol
from k3mlx.server.queue import FairQueue
from k3mlx.server.requests import Limits
from tests.server.conftest import until

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, None),
        ({"messages": [{"role": "robot", "content": "x"}]}, None),
        ({"messages": [{"role": "user", "content": 5}]}, None),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            None,
        ),
        ({**HI, "max_tokens": 0}, "max_tokens"),
        ({**HI, "max_tokens": "5"}, "max_tokens"),
        ({**HI, "max_tokens": True}, "max_tokens"),
        ({**HI, "temperature": -1}, "temperature"),
        ({**HI, "temperature": 2.1}, "temperature"),
        ({**HI, "temperature": []}, "temperature"),
        ({**HI, "top_p": 1.5}, "top_p"),
        ({**HI, "top_k": 0.5}, "top_k"),
        ({**HI, "n": 2}, "n"),
        ({**HI, "stream": "yes"}, "stream"),
        ({**HI, "stream_options": []}, "stream_options"),
        ({**HI, "stop": [1]}, "stop"),
        ({**HI, "stop": ""}, "stop"),
        ({**HI, "stop": ["a"] * 17}, "stop"),
        ({**HI, "seed": 1.5}, "seed"),
        ({**HI, "logprobs": 3}, "logprobs"),
        ({**HI, "top_logprobs": 3}, "top_logprobs"),
        ({**HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**HI, "presence_penalty": 1}, "presence_penalty"),
        ({**HI, "logit_bias": {"5": 1}}, "logit_bias"),
        ({**HI, "functions": [{"name": "f"}]}, "functions"),
        ({**HI, "modalities": ["audio"]}, "modalities"),
        ({**HI, "reasoning_effort": "extreme"}, None),
        ({**HI, "thinking": 5}, None),
        ({**HI, "tools": {}}, None),
        ({**HI, "tools": [{"type": "function"}]}, None),
        ({**HI, "tool_choice": "required"}, None),
        ({**HI, "tool_choice": "sometimes"}, None),
        ({**HI, "response_format": {"type": "xml"}}, None),
        ({**HI, "response_format": {"type": "json_schema"}}, None),
        ({**HI, "messages": [{"role": "tool", "content": "x"}]}, None),
        ({**HI, "model": 5}, "model"),
    ],
)
def test_fields_that_cannot_be_used(random_server, body, param):
    response = random_server.post(**body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_what_is_only_bookkeeping_is_ignored(random_server):
    extras = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "n": 1}
    neutral = {"presence_penalty": 0, "logit_bias": {}, "stop": None, "seed": None, "unheard_of": [1]}
    assert random_server.post(**HI, **extras, **neutral).status_code == 200


def test_too_long_a_prompt(random_server):
    long = [{"role": "user", "content": "x" * 7000}]
    for more in ({}, {"stream": True}):
        response = random_server.post(messages=long, **more)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "expected at most 6000" in response.json()["error"]["message"]
    assert random_server.worker.report["prompt_tokens"] == 0


def test_paths_and_methods(random_server):
    http = random_server.http
    assert (http.get("/v2").status_code, http.get("/v1/chat/completions").status_code) == (404, 405)
    assert http.get("/v2").json()["error"]["message"] == "GET /v2 does not exist"
    assert http.get("/v1/models").json()["data"][0]["id"] == "test"
    assert http.get("/v1/models/test").json()["context_length"] == 6000
    assert http.get("/v1/models/other").status_code == 404
    assert random_server.post(**HI, model="gpt-9").json()["error"]["code"] == "model_not_found"


def malformed(count: int):
    """Bodies of every wrong kind: cut, mutated, retyped, nested, not even text."""
    rng = random.Random(8)
    good = json.dumps(
        {
            **HI,
            "stream": False,
            "temperature": 0.5,
            "stop": ["x"],
            "seed": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "thinking": {"type": "enabled"},
        }
    ).encode()
    odd = [None, True, -1, 1e308, 10**400, "", "\x00", "\ud800", [], {}, [[]], {"a": {"b": []}}, "x" * 5000]
    keys = list(json.loads(good))
    yield from (
        b"",
        b"null",
        b"[]",
        b"5",
        b'"x"',
        b"{",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"messages":NaN}',
    )
    yield b"[" * 100_000
    yield b'{"messages":' * 5000 + b"1" + b"}" * 5000
    yield b'{"messages":' + b"9" * 10_000 + b"}"
    for n in range(count):
        kind = n % 4
        if kind == 0:
            yield good[: rng.randrange(len(good))]
        elif kind == 1:
            data = bytearray(good)
            for _ in range(rng.randint(1, 5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            yield bytes(data)
        else:
            value = json.loads(good)
            for key in rng.sample(keys, rng.randint(1, 3)):
                value[key] = rng.choice(odd)
            if kind == 3:
                message = {key: rng.choice(odd) for key in ("role", "content", "tool_calls", "name", "tools")}
                message["role"] = rng.choice(["user", "assistant", "tool", "system", *odd])
                value["messages"] = [rng.choice([message, message, {"role": "user", "content": [message]}])]
            yield json.dumps(value).encode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_malformed_bodies_are_never_an_internal_error(random_server, path):
    codes: dict[int, int] = {}
    for data in malformed(250):
        response = random_server.http.post(path, content=data)
        codes[response.status_code] = codes.get(response.status_code, 0) + 1
        assert response.status_code in (200, 400, 404), data[:500]
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert codes[400] > 200
    assert random_server.post(**HI).status_code == 200


def test_bodies_that_are_too_large(random_server):
    """100 MB against a limit of 1 MB: said, not kept, and the server goes on."""

    def refused(content) -> None:
        response = random_server.http.post("/v1/chat/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "too_large"

    before = metrics.resident_bytes() or 0
    refused(b"x" * 1_000_000 for _ in range(100))  # the client is in this process too: a part at a time
    after = metrics.resident_bytes() or 0
    assert after - before < 60_000_000
    refused(b"x" * 100_000_000)
    assert random_server.post(**HI).status_code == 200


def test_many_messages(scripted):
    served = scripted("x", limits=Limits(messages=3))
    response = served.post(messages=[{"role": "user", "content": "x"}] * 4)
    assert "4 messages; expected at most 3" in response.json()["error"]["message"]


def test_the_key(scripted):
    served = scripted("x", api_key="sesame")
    assert served.post(**HI).status_code == 401
    assert served.post(**HI).json()["error"]["type"] == "authentication_error"
    for wrong in ("Bearer sesam", "Basic sesame", "sesame", "Bearer \xe9"):
        headers = {"authorization": wrong.encode("latin-1")}
        assert served.http.post("/v1/chat/completions", json=HI, headers=headers).status_code == 401
    right = {"authorization": "bearer sesame"}
    assert served.http.post("/v1/chat/completions", json=HI, headers=right).status_code == 200
    assert served.http.get("/metrics").status_code == 401
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/").status_code == 200


def test_pages_of_elsewhere_may_not_ask(scripted):
    served = scripted("x", origins=("http://allowed.example",))

    def ask(**headers):
        return served.http.post("/v1/chat/completions", json=HI, headers=headers)

    assert ask(origin="http://evil.example").status_code == 403
    assert ask(origin="null").status_code == 403
    assert ask(origin="http://[").status_code == 403
    assert ask(origin=served.url).status_code == 200
    allowed = ask(origin="http://allowed.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "http://allowed.example"
    assert ask(host="evil.example").status_code == 403  # a name that was made to point here
    assert ask(host="localhost:99").status_code == 200
    assert "access-control-allow-origin" not in ask().headers


def test_dribbled_heads_are_cut_off_and_hold_nobody_up(random_server, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    host, port = random_server.url.removeprefix("http://").split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(100)]
    started = time.monotonic()
    for one in sockets:
        one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    assert random_server.post(**HI).status_code == 200
    for one in sockets:
        one.settimeout(10)
        assert one.recv(100) == b""
        one.close()
    assert time.monotonic() - started < 5


def test_dribbled_bodies_are_cut_off(random_server, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    host, port = random_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as one:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{")
        one.settimeout(10)
        assert b" 408 " in one.recv(1000)


def test_a_connection_is_used_again_and_watched_again(random_server, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    host, port = random_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as one:
        one.settimeout(10)
        for _ in range(2):
            one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += one.recv(10_000)
            assert b"200 OK" in answer
            time.sleep(0.7)  # idle is allowed
        one.sendall(b"GET /health HT")
        assert one.recv(100) == b""


def test_not_http_at_all(random_server):
    host, port = random_server.url.removeprefix("http://").split(":")
    for data in (b"\x16\x03\x01\x02\x00" * 50, b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000 + b"\r\n\r\n"):
        with socket.create_connection((host, int(port))) as one:
            one.settimeout(10)
            try:
                one.sendall(data)
                assert not one.recv(100).startswith(b"HTTP/1.1 5")
            except ConnectionError:
                pass
    assert random_server.post(**HI).status_code == 200


def test_clients_are_served_in_turn():
    queue: FairQueue[str] = FairQueue()
    for client, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        queue.put(client, item)
    assert [queue.ahead(item) for item in ("a1", "b1", "c1", "a2", "b2", "a3")] == [0, 1, 2, 3, 4, 5]
    assert queue.remove("c1")
    assert not queue.remove("c1")
    assert queue.take() == "a1"
    queue.put("d", "d1")
    assert [queue.ahead(item) for item in ("b1", "a2", "d1", "b2", "a3")] == [0, 1, 2, 3, 4]
    assert [queue.take() for _ in range(len(queue))] == ["b1", "a2", "d1", "b2", "a3"]
    assert len(queue) == 0


def test_completions(scripted):
    served = scripted("bcd<|end_of_msg|>")
    answer = served.openai.completions.create(model="test", prompt="a", temperature=0, logprobs=1)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        "bcd",
        "stop",
    )
    assert answer.usage.prompt_tokens == 1
    assert answer.choices[0].logprobs.tokens == ["b", "c", "d"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
    ids = served.worker.engine.tokenizer.encode("a")
    for prompt in (ids, [ids], ["a"]):
        assert (
            served.openai.completions.create(model="test", prompt=prompt, temperature=0).choices[0].text
            == "bcd"
        )
    echo = served.openai.completions.create(model="test", prompt="a", temperature=0, echo=True, max_tokens=2)
    assert (echo.choices[0].text, echo.choices[0].finish_reason) == ("abc", "length")
    chunks = list(
        served.openai.completions.create(model="test", prompt="a", temperature=0, stream=True, stop="d")
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "bc"
    assert chunks[-1].choices[0].finish_reason == "stop"
    for bad in ("", [], ["a", "b"], [[1], [2]], [1, "a"], 5, None, [10**6], [-1], [True]):
        assert served.post("/v1/completions", prompt=bad).status_code == 400


def test_special_names_in_a_raw_prompt_are_text(scripted):
    served = scripted("b<|end_of_msg|>")
    answer = served.openai.completions.create(model="test", prompt="<|end_of_msg|>", temperature=0)
    assert answer.usage.prompt_tokens == len("<|end_of_msg|>")


def test_metrics_count(scripted):
    served = scripted("bcd<|end_of_msg|>")
    for _ in range(2):
        served.openai.completions.create(model="test", prompt="aaa", temperature=0)
    until(lambda: served.worker.running is None)
    assert served.metric('k3mlx_requests_total{result="answers"}') == 2
    assert served.metric("k3mlx_prompt_tokens_total") == 6
    assert served.metric("k3mlx_generated_tokens_total") == 8
    text = served.http.get("/metrics").text
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
