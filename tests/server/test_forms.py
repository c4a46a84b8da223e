"""Answers that are held to a form, over HTTP."""

import json

import pytest

import k3mlx.grammar
import k3mlx.server.worker as worker

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["a", "bc"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}}}
    for name in ("one", "two")
]  # fmt: skip
AT_ONCE = {"thinking": {"type": "disabled"}}


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema(random_server, stream):
    answer = random_server.chat(
        response_format=FORM, extra_body=AT_ONCE, max_tokens=300, temperature=1, stream=stream
    )
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert reason == "stop"
    assert set(json.loads(text)) == {"n", "s"}


def test_a_named_function_is_called(random_server):
    choice = {"type": "function", "function": {"name": "two"}}
    # a random model would write text for ever, so the answer is cut: nothing but that function can be called
    served = random_server
    answer = served.chat(tools=TOOLS, tool_choice=choice, extra_body=AT_ONCE, max_tokens=900, temperature=1)
    for call in answer.choices[0].message.tool_calls or []:
        assert call.function.name == "two"
        assert json.loads(call.function.arguments)["n"] in range(10)
    for wrong in (
        {"type": "function", "function": {"name": "three"}},
        {"type": "function"},
        {"type": "custom"},
    ):
        response = served.post(messages=[{"role": "user", "content": "x"}], tools=TOOLS, tool_choice=wrong)
        assert response.status_code == 400


def test_schemas_that_cannot_be_enforced(random_server):
    for schema in (
        {"type": "nonsense"},
        {"type": "object", "properties": 5},
        {"$ref": "#/x"},
        {"type": ["x"]},
    ):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        response = random_server.post(messages=[{"role": "user", "content": "x"}], response_format=form)
        assert response.status_code == 400
        assert "cannot be enforced" in response.json()["error"]["message"]


def test_a_partial_message_is_not_held_to_a_form(random_server):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{", "partial": True}]
    response = random_server.post(messages=messages, response_format={"type": "json_object"})
    assert response.status_code == 400
    assert "partial" in response.json()["error"]["message"]


def test_without_the_extra_it_is_refused(random_server, monkeypatch):
    monkeypatch.setattr(k3mlx.grammar, "AVAILABLE", False)
    monkeypatch.setattr(worker, "AVAILABLE", False)
    message = [{"role": "user", "content": "x"}]
    response = random_server.post(messages=message, response_format={"type": "json_object"})
    assert response.status_code == 400
    assert "pip install llguidance" in response.json()["error"]["message"]
    named = {"type": "function", "function": {"name": "one"}}
    assert random_server.post(messages=message, tools=TOOLS, tool_choice=named).status_code == 400
    assert random_server.post(messages=message, tools=TOOLS, tool_choice="required").status_code == 200
