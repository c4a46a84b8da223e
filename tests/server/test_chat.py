"""Chat answers as OpenAI's own client and a reader of raw frames see them."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

import k3mlx
from k3mlx.generation import complete, token_logprob
from tests.server.conftest import in_process, until
from tests.text import marked

ANSWER = marked("Hm, é.)think·(response·Grüße 🚀 to you)response·)message·¶")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = marked(
    'Look.)think·(response·)response·(tools·(call tool="weather" index="1"·(argument key="city" type="string"·'
    'Pa"ris)argument·(argument key="days" type="number"·2)argument·)call·(call tool="weather" index="2"·'
    '(argument key="city" type="string"·Rome)argument·)call·)tools·)message·¶'
)
ARGUMENTS = ['{"city": "Pa\\"ris", "days": 2}', '{"city": "Rome"}']


def frames(served, **body):
    """Raw stream: (comments, objects), checked to end with [DONE]."""
    with served.http.stream(
        "POST", "/v1/chat/completions", json={"stream": True, "temperature": 0, **body}
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(response.iter_text()).split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    comments = [block for block in blocks if block.startswith(":")]
    data = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in data)
    return comments, [json.loads(block[6:]) for block in data]


def test_a_whole_answer(scripted):
    answer = scripted(ANSWER).chat()
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Grüße 🚀 to you")
    assert choice.message.reasoning_content == "Hm, é."
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", "test")
    assert answer.id.startswith("chatcmpl-")
    assert len(answer.id) == len("chatcmpl-") + 24


def test_usage_counts_ids_and_leaves_the_opener_out(scripted):
    """Report 7: the hosted service does not count the opener of the answer's channel."""
    served = scripted(ANSWER)
    tokenizer = served.worker.engine.tokenizer
    usage = served.chat().usage
    prompt = marked('(message role="user"·hi)message·¶(message role="assistant"·')
    assert usage.prompt_tokens == len(tokenizer.encode(prompt, allow_special=True))
    assert usage.completion_tokens == len(tokenizer.encode(ANSWER, allow_special=True))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    thinking = len(tokenizer.encode(marked("Hm, é.)think·"), allow_special=True))
    assert usage.completion_tokens_details.reasoning_tokens == thinking


def test_frames_of_a_stream(scripted):
    """Report 14, and the wire form of text specification §4.4."""
    _, objects = frames(scripted(ANSWER), messages=[{"role": "user", "content": "hi"}])
    first, *middle, last = objects
    assert {(o["id"], o["object"], o["created"], o["model"]) for o in objects} == {
        (first["id"], "chat.completion.chunk", first["created"], "test")
    }
    assert all(len(o["choices"]) == 1 and o["choices"][0]["index"] == 0 for o in objects)
    deltas = [o["choices"][0]["delta"] for o in middle]
    assert first["choices"][0]["delta"] == {"role": "assistant"}
    assert all(o["choices"][0]["finish_reason"] is None for o in (first, *middle))
    assert all(len(delta) == 1 for delta in deltas)
    names = [next(iter(delta)) for delta in deltas]
    boundary = names.index("content")
    assert set(names[:boundary]) == {"reasoning_content"}
    assert set(names[boundary:]) == {"content"}
    assert deltas[boundary - 1] == {"reasoning_content": ""}
    assert "".join(delta["reasoning_content"] for delta in deltas[:boundary]) == "Hm, é."
    assert "".join(delta["content"] for delta in deltas[boundary:]) == "Grüße 🚀 to you"
    assert all("\ufffd" not in next(iter(delta.values())) for delta in deltas)
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert last["usage"]["completion_tokens"] > 0


def test_usage_frame_when_asked_for(scripted):
    options = {"include_usage": True}
    _, objects = frames(
        scripted(ANSWER), messages=[{"role": "user", "content": "hi"}], stream_options=options
    )
    assert objects[-1]["choices"] == []
    assert objects[-1]["usage"] == objects[-2]["usage"]
    assert set(objects[-1]["usage"]["completion_tokens_details"]) == {"reasoning_tokens"}


def test_tools_round_trip(scripted):
    served = scripted(
        {"go": CALLS, "sunny": marked("Fine.)think·(response·It is sunny.)response·)message·¶")}
    )
    messages = [{"role": "user", "content": "go"}]
    choice = served.chat(messages=messages, tools=[TOOL]).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == ""
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", arguments) for arguments in ARGUMENTS
    ]
    assert calls[0].id.startswith("call_")
    assert calls[0].id != calls[1].id
    messages.append(choice.message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": f"sunny {n}"} for n, call in enumerate(calls)
    ]
    answer = served.chat(messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "It is sunny."
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_streamed_calls_join_to_the_whole_ones(scripted):
    """Reports 5 and 21: arguments come while they are written, the name whole and first."""
    _, objects = frames(scripted(CALLS), messages=[{"role": "user", "content": "go"}], tools=[TOOL])
    deltas = [o["choices"][0]["delta"] for o in objects]
    parts = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(part) == 1 for part in parts)
    joined = ["", ""]
    for (part,) in parts:
        index = part["index"]
        if "id" in part:
            assert set(part) == {"index", "id", "type", "function"}
            assert part["function"] == {"name": "weather", "arguments": ""}
            assert joined[index] == ""
        else:
            assert set(part) == {"index", "function"}
            assert set(part["function"]) == {"arguments"}
            joined[index] += part["function"]["arguments"]
    assert joined == ARGUMENTS
    assert len(parts) > 8
    assert objects[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_call_only(scripted):
    served = scripted(CALLS)
    choice = served.chat(tools=[TOOL], parallel_tool_calls=False).choices[0]
    assert [call.function.arguments for call in choice.message.tool_calls] == ARGUMENTS[:1]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "content"),
    [
        (["🚀 to"], "Grüße "),
        ("üße", "Gr"),
        (["you!", " to y"], "Grüße 🚀"),
        (["Hm", "never"], "Grüße 🚀 to you"),  # only the answer counts, not the thinking
        (["you and"], "Grüße 🚀 to you"),  # what was held back comes in the end
        (["<|close|>"], "Grüße 🚀 to you"),
        ("Grüße", ""),
    ],
)
def test_stop_strings(scripted, stop, content, stream):
    served = scripted(ANSWER)
    answer = served.chat(stop=stop, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        assert "".join(choice.delta.content or "" for choice in chunks) == content
        assert chunks[-1].finish_reason == "stop"
    else:
        assert answer.choices[0].message.content == content
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.reasoning_content == "Hm, é."


def test_a_limit_within_the_thinking(scripted):
    """Report 4: thinking that was cut is not the answer."""
    choice = scripted(ANSWER).chat(max_completion_tokens=3).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content == ""
    assert choice.message.reasoning_content == "Hm,"


def test_a_call_cut_by_the_limit_is_no_call(scripted):
    choice = scripted(CALLS).chat(tools=[TOOL], max_tokens=60).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


def test_a_spelled_call_is_content(scripted):
    """Report 9: only control ids make a call."""
    spelled = '<|open|>tools<|sep|><|open|>call tool="weather"<|sep|>'
    served = scripted("")
    tokenizer = served.worker.engine.tokenizer
    end = tokenizer.encode(marked(")response·)message·¶"), allow_special=True)
    served.backend.answers = {"": [*tokenizer.encode(spelled), *end]}
    choice = served.chat(tools=[TOOL], extra_body={"thinking": {"type": "disabled"}}).choices[0]
    assert choice.message.content == spelled
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("thinking", [True, False])
def test_logprobs_are_those_of_the_content(scripted, thinking):
    served = scripted(ANSWER if thinking else "ab" + marked(")response·)message·¶"))
    extra = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    choice = served.chat(logprobs=True, top_logprobs=2, extra_body=extra).choices[0]
    listed = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in listed).decode() == choice.message.content
    probability = logprob_of_twenty(served.worker.engine.config.vocab_size)
    assert all(entry.logprob == pytest.approx(probability) for entry in listed)
    assert all(entry.top_logprobs[0].token == entry.token for entry in listed)
    assert all(len(entry.top_logprobs) == 2 for entry in listed)
    streamed = served.chat(logprobs=True, top_logprobs=2, extra_body=extra, stream=True)
    found = [
        entry for chunk in streamed for entry in getattr(chunk.choices[0].logprobs, "content", None) or []
    ]
    assert found == listed


def logprob_of_twenty(size: int) -> float:
    """log of exp(20) / (exp(20) + size - 1)."""
    return -math.log1p((size - 1) * math.exp(-20))


def test_token_logprob_agrees_with_the_definition():
    logits = np.array([0.5, -1, 2, 2, 0], np.float32)
    found = token_logprob(logits, 1, 3)
    expected = np.log(np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum())
    assert found.logprob == pytest.approx(expected[1])
    assert [id for id, _ in found.top] == [2, 3, 0]
    assert [value for _, value in found.top] == pytest.approx(list(expected[[2, 3, 0]]))


def test_seed_repeats_and_agrees_with_the_library(random_server, roomy_model):
    def ask(seed):
        return random_server.chat("hello", temperature=1, seed=seed, max_tokens=12).choices[0].message

    one, two, other = ask(5), ask(5), ask(6)
    assert one == two
    assert one != other
    with k3mlx.load(roomy_model) as engine:
        direct = complete(engine, "hello", temp=1.0, seed=5, max_tokens=12)
    assert (direct.text, direct.reasoning) == (one.content, getattr(one, "reasoning_content", ""))
    assert random_server.chat(temperature=1, seed=-3, max_tokens=2).choices


def test_eight_clients_each_get_their_own_answer(roomy_model, random_server):
    texts = [f"client number {n}" for n in range(8)]
    with k3mlx.load(roomy_model) as engine:
        expected = [complete(engine, text, temp=0, max_tokens=10).reasoning for text in texts]
    assert len(set(expected)) > 4

    def ask(text):
        stream = random_server.chat(text, max_tokens=10, stream=True)
        return "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in stream)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, texts)) == expected


def test_waiting_clients_get_comments(scripted):
    served = scripted(ANSWER, comment_seconds=0.05)
    served.backend.layer_seconds = 0.05
    stream = served.chat(stream=True, max_tokens=5)
    next(iter(stream))
    comments, objects = frames(served, messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    stream.close()
    assert ": waiting, 1 before this request" in comments
    assert any(comment.startswith(": reading the prompt, ") for comment in comments)
    assert objects[-1]["choices"][0]["finish_reason"] == "length"


def test_closing_the_stream_stops_the_work_within_a_layer(scripted):
    served = scripted(marked("x" * 5000))
    served.backend.layer_seconds = 0.02
    stream = served.chat(stream=True)
    for _, chunk in zip(range(5), stream, strict=False):
        assert chunk
    stream.close()
    until(lambda: served.worker.running is None)
    layers = served.backend.layers
    assert served.metric('k3mlx_requests_total{result="cancelled"}') == 1
    served.backend.layer_seconds = 0
    served.backend.answers = {"": ANSWER}
    assert served.backend.layers == layers
    assert served.chat().choices[0].message.content == "Grüße 🚀 to you"


def test_leaving_stops_reading_a_prompt_between_layers(scripted):
    served = scripted(ANSWER)
    served.backend.layer_seconds = 0.3
    with pytest.raises(openai.APITimeoutError):
        served.openai.with_options(timeout=0.4).chat.completions.create(
            model="default", messages=[{"role": "user", "content": "hi"}]
        )
    until(lambda: served.worker.running is None, 2)
    assert served.backend.layers <= 3
    assert served.backend.fed == []


def test_leaving_the_line(scripted):
    served = scripted(ANSWER)
    served.backend.layer_seconds = 0.05
    first = served.chat(stream=True)
    next(iter(first))
    second = served.chat("other", stream=True)
    until(lambda: served.worker.queue_length == 1)
    second.close()
    until(lambda: served.worker.queue_length == 0)
    first.close()
    until(lambda: served.worker.running is None)


def test_a_full_line_is_said(scripted):
    served = scripted(ANSWER, queue_limit=1)
    served.backend.layer_seconds = 0.05
    streams = [served.chat(stream=True)]
    next(iter(streams[0]))
    streams.append(served.chat(stream=True))
    until(lambda: served.worker.queue_length == 1)
    with pytest.raises(openai.RateLimitError, match="1 requests are waiting already"):
        served.chat()
    for stream in streams:
        stream.close()


def test_questions_while_loading_are_refused_kindly(roomy_model):
    go = threading.Event()

    def slow():
        go.wait(30)
        return k3mlx.load(roomy_model)

    with in_process(slow, wait=False) as served:
        health = served.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        response = served.post(messages=[{"role": "user", "content": "hi"}])
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert response.headers["retry-after"]
        go.set()
        until(lambda: served.http.get("/health").status_code == 200)
        assert served.chat(max_tokens=1).choices
