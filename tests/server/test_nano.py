"""OpenAI's own client against `k3mlx serve` with the small model of the package, and a soak of requests."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.conftest import Process

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CANCELLED = 'k3mlx_requests_total{result="cancelled"}'
COLOURS = ["red", "blue", "green", "black", "white", "brown", "yellow", "orange"]


@pytest.fixture(scope="module")
def nano():
    server = Process(None)
    yield server.wait_ready()
    assert server.end()[0] == 0
    server.close()


def test_models_and_an_answer(nano):
    assert [model.id for model in nano.openai.models.list()] == ["k3-nano"]
    answer = nano.chat('Repeat this exactly: "the green river runs"')
    assert answer.choices[0].message.content == "the green river runs"
    assert answer.choices[0].message.reasoning_content


def test_a_stream_is_the_answer(nano):
    whole = nano.chat("Hello! Who are you?").choices[0].message
    with nano.openai.chat.completions.stream(
        model="k3-nano", messages=[{"role": "user", "content": "Hello! Who are you?"}]
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.content
    assert final.choices[0].finish_reason == "stop"


def test_tools_round_trip_and_reuse(nano):
    messages = [{"role": "user", "content": 'What is the weather in "Paris"?'}]
    first = nano.chat(messages=messages, tools=[WEATHER])
    (call,) = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    result = {"city": "Paris", "sky": "cloudy", "temperature": 17}
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    second = nano.chat(messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == 'It is cloudy in "Paris", 17 degrees.'
    # all of the first prompt and of the answer, but for the id that ended it
    read = first.usage.prompt_tokens + 3 + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == read


def test_json_schema(nano):
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    answer = nano.chat("What is 12 + 7?", response_format=form).choices[0]
    assert answer.finish_reason == "stop"
    assert set(json.loads(answer.message.content)) == {"sum"}


def test_eight_clients_at_once(nano):
    def ask(colour):
        stream = nano.chat(f'Say "the {colour} door"', stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, COLOURS)) == [f"the {colour} door" for colour in COLOURS]


def test_stop_and_limit(nano):
    assert nano.chat('Say "one two three"', stop=[" two"]).choices[0].message.content == "one"
    assert nano.chat('Say "one two three"', max_tokens=3).choices[0].finish_reason == "length"


def test_a_seed_repeats_and_logprobs_are_those_of_the_answer(nano):
    options = {"temperature": 1.5, "top_p": 1, "max_tokens": 24, "logprobs": True, "top_logprobs": 2}
    first, again, other = (nano.chat("Tell me a story.", seed=seed, **options) for seed in (7, 7, 8))
    assert first.choices[0].message == again.choices[0].message
    assert first.choices[0].message != other.choices[0].message
    greedy = nano.chat('Say "one two three"', logprobs=True, top_logprobs=2).choices[0]
    tokens = greedy.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == greedy.message.content
    assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in tokens)


def test_closing_the_stream_ends_the_work_and_the_next_request_is_served(nano):
    before = nano.metric(CANCELLED)
    stream = nano.chat("Tell me a story.", stream=True, temperature=1.5, seed=1, max_tokens=2000)
    next(iter(stream))
    stream.close()
    assert nano.chat('Say "still here"').choices[0].message.content == "still here"
    assert nano.metric(CANCELLED) == before + 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the present size of a process")
def test_two_thousand_requests_do_not_grow_the_server():
    """Chats of changing lengths and kinds, each tenth one left in the middle of its stream."""
    server = Process(None, "--session-memory", "20MB", "--session-disk", "0")
    served = server.wait_ready()
    memory = []

    def ask(number):
        text = f'Say "{COLOURS[number % 8]} {number}"' + " please" * (number % 40)
        if number % 10 == 9:
            stream = served.chat(text, stream=True)
            next(iter(stream))
            stream.close()
        else:
            stream = served.chat(
                text, stream=number % 3 == 0, max_tokens=8 + number % 5, logprobs=number % 2 == 0
            )
            if number % 3 == 0:
                assert list(stream)[-1].choices[0].finish_reason

    with ThreadPoolExecutor(4) as pool:
        for start in range(0, 2000, 200):
            list(pool.map(ask, range(start, start + 200)))
            memory.append(served.metric("process_resident_memory_bytes"))
    print("MB after each 200 requests:", *(round(size / 1e6, 1) for size in memory))  # shown with -rP
    assert memory[-1] < 1.05 * memory[0], memory
    assert served.metric("k3mlx_requests_waiting") == 0
    assert server.end()[0] == 0
    server.close()
