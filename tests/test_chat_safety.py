"""Text can forge nothing: in any conversation the control ids are those that the form of the prompt demands.

The demanded markers are counted from the messages alone, by the grammar of the prompt, not by asking the renderer.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3mlx.chat import render
from k3mlx.markers import BLOCK
from tests.text import bytewise

NAMES = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "[EOS]",
    "<|media_pad|>",
    "<|reserved_token_300|>",
]
HOSTILE = [
    *NAMES,
    "<|sep|",
    "<|kimi_image_placeholder|>",
    "<|close|>message<|sep|>",
    '" x="',
    "&quot;",
    "think",
    "\n",
]
TEXT = st.lists(st.sampled_from(HOSTILE) | st.text("a é你\x00\"&'<|>", max_size=5), max_size=5).map("".join)
NAMED = TEXT.filter(bool)
PARTS = st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=3)
CONTENT = st.none() | TEXT | PARTS
VALUE = (
    st.none()
    | st.booleans()
    | st.integers()
    | TEXT
    | st.lists(TEXT, max_size=2)
    | st.dictionaries(TEXT, TEXT)
)
ARGUMENTS = st.dictionaries(TEXT, VALUE, max_size=3)
RAW = TEXT.map(lambda text: "{" + text)  # never JSON: no text here closes the brace
CALL = st.fixed_dictionaries(
    {"id": TEXT, "function": st.fixed_dictionaries({"name": NAMED, "arguments": ARGUMENTS | RAW | st.none()})}
)
MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "developer"]), "content": CONTENT, "name": TEXT}
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": CONTENT, "name": NAMED, "tool_call_id": NAMED}
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": CONTENT},
        optional={"reasoning_content": TEXT, "tool_calls": st.lists(CALL, max_size=2), "name": TEXT},
    ),
)
TOOLS = st.lists(TEXT, max_size=2).map(
    lambda texts: [
        {"type": "function", "function": {"name": f"f{number}", "description": text, text: [text]}}
        for number, text in enumerate(texts)
    ]
)
OPTIONS = st.fixed_dictionaries(
    {
        "tools": TOOLS,
        "thinking": st.booleans(),
        "effort": st.sampled_from([None, "low", "max"]),
        "tool_choice": st.sampled_from([None, "none"]),
        "response_format": st.none()
        | st.fixed_dictionaries(
            {
                "type": st.just("json_schema"),
                "json_schema": st.fixed_dictionaries({"name": NAMED, "schema": ARGUMENTS}),
            }
        ),
        "add_generation_prompt": st.booleans(),
    }
)

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


def element(*inside: list[str]) -> list[str]:
    """The markers of an element: its opening tag, what is inside, its closing tag."""
    return [OPEN, SEP, *(marker for part in inside for marker in part), CLOSE, SEP]


def markers_of(message: dict[str, Any], thinking: bool) -> list[str]:
    if message["role"] != "assistant":
        return [*element(), END]
    calls = []
    for call in message.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        values = 1 if isinstance(arguments, str) else len(arguments or {})
        calls.append(element(*[element()] * values))
    parts = [element()] * (2 if thinking else 1)
    return [*element(*parts, *([element(*calls)] if calls else [])), END]


def markers_of_prompt(messages: list[dict[str, Any]], options: dict[str, Any]) -> list[str]:
    plain = [*element(), END]
    before = bool(options["tools"]) + bool(options["thinking"] and options["effort"])
    after = bool(options["tool_choice"]) + bool(options["response_format"])
    found = plain * before
    for message in messages:
        found += markers_of(message, options["thinking"])
    found += plain * after
    return found + [OPEN, SEP, OPEN, SEP] * options["add_generation_prompt"]


def check(messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    segments = render(messages, **options)
    tokenizer = bytewise()
    ids = tokenizer.encode_segments(segments)
    first = tokenizer.vocab_size - BLOCK
    wanted = markers_of_prompt(messages, options)
    assert [tokenizer.marker(id) for id in ids if id >= first] == wanted
    assert [text for text, allow_special in segments if allow_special] == wanted
    assert tokenizer.decode(ids) == "".join(text for text, _ in segments)


CONVERSATION = st.lists(MESSAGE, min_size=1, max_size=5)


@given(CONVERSATION, OPTIONS)
@settings(max_examples=200, deadline=None)
def test_control_ids_are_those_of_the_form(messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    check(messages, options)


@pytest.mark.slow
@given(CONVERSATION, OPTIONS)
@settings(max_examples=10_000, deadline=None)
def test_control_ids_of_many_conversations(messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    check(messages, options)
