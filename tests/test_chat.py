"""Prompts: the vectors, every rule of the prompt format, and what a request may not ask for."""

import hashlib
import json
from typing import Any

import pytest

from k3mlx.chat import Segment, render
from k3mlx.chat_protocol import request_thinking
from k3mlx.errors import UsageError
from tests.messages import CALLS, USER, assistant, call, image, result
from tests.paths import needs_data
from tests.text import SIGNS, VECTORS, WEATHER, bytewise, joined, released


def with_weather(value: Any) -> Any:
    """The vector's value with the weather tool in its place."""
    if isinstance(value, list):
        return [with_weather(item) for item in value]
    if isinstance(value, dict):
        return {key: with_weather(item) for key, item in value.items()}
    return WEATHER if value == "@weather" else value


PROMPTS = [pytest.param(v, id=v["title"]) for v in with_weather(VECTORS["prompts"])]


@pytest.mark.parametrize("vector", PROMPTS)
def test_prompt_text(vector: dict[str, Any]) -> None:
    text = joined(render(vector["messages"], **vector["options"]))
    assert text == vector.get("string", text)
    assert (
        bytewise().decode(bytewise().encode_segments(render(vector["messages"], **vector["options"]))) == text
    )


@needs_data
@pytest.mark.parametrize("vector", PROMPTS)
def test_prompt_ids(vector: dict[str, Any]) -> None:
    ids = released().encode_segments(render(vector["messages"], **vector["options"]))
    assert len(ids) == vector["n"]
    assert hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest() == vector["sha256"]


@needs_data
@pytest.mark.parametrize(
    ("message", "options", "count"),
    [
        (
            {"role": "user", "content": "请用 JSON 格式回答：北京是中国的首都吗？答案需要包含键 capital。"},
            {"thinking": False},
            36,
        ),
        ({"role": "user", "content": "hi"}, {}, 19),
        ({"role": "user", "content": "hi"}, {"effort": "max"}, 86),
        ({"role": "assistant", "content": "你好"}, {"effort": "high"}, 99),
    ],
)
def test_published_counts(message: dict[str, Any], options: dict[str, Any], count: int) -> None:
    opener = 3  # ids of the channel opener at the end, which the published counts leave out
    assert len(released().encode_segments(render([message], **options))) - opener == count


@needs_data
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"effort": "max"}, 67),
        ({"effort": "low"}, 68),
        ({"effort": "high"}, 68),
        ({"tools": [WEATHER], "tool_choice": "required"}, 36),
        ({"tools": [WEATHER], "tool_choice": "none"}, 38),
        ({"response_format": {"type": "json_object"}}, 47),
    ],
)
def test_ids_of_protocol_messages(options: dict[str, Any], count: int) -> None:
    messages = [{"role": "user", "content": "a"}]
    without = {"tools": options.get("tools")}
    ids = [len(released().encode_segments(render(messages, **given))) for given in (options, without)]
    assert ids[0] - ids[1] == count


SIGN = {name: sign for sign, name in SIGNS.items()}


def shown(messages: Any, **options: Any) -> str:
    """A prompt, without the next message's opening, with markers as signs."""
    options = {"add_generation_prompt": False, "thinking": False} | options
    segments = render(messages, **options)
    return "".join(SIGN[text] if special else text for text, special in segments)


def test_attributes_are_four_segments() -> None:
    assert render([{"role": "user", "content": "hi", "name": 'a"&<b>'}])[:11] == [
        Segment("<|open|>", True),
        Segment("message"),
        Segment(" role"),
        Segment('="'),
        Segment("user"),
        Segment('"'),
        Segment(" name"),
        Segment('="'),
        Segment("a&quot;&amp;<b>"),
        Segment('"'),
        Segment("<|sep|>", True),
    ]


def test_text_parts_stay_apart() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": ""}, {"type": "text", "text": "lo"}]
    segments = render([{"role": "user", "content": parts}])
    assert segments[7:9] == [Segment("hel"), Segment("lo")]


@pytest.mark.parametrize("content", ["", None, []])
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_empty_content(role: str, content: Any) -> None:
    inside = "(response·)response·" if role == "assistant" else ""
    assert shown([{"role": role, "content": content}]) == f'(message role="{role}"·{inside})message·¶'
    assert shown([{"role": role}]) == f'(message role="{role}"·{inside})message·¶'


def test_developer_is_system() -> None:
    assert shown([{"role": "developer", "content": "x"}]) == '(message role="system"·x)message·¶'


@pytest.mark.parametrize("name", [None, ""])
def test_empty_names_are_left_out(name: str | None) -> None:
    assert shown([{"role": "user", "content": "x", "name": name}]) == '(message role="user"·x)message·¶'


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": " r\n"}, " r\n"),
        ({"reasoning": "r"}, "r"),
        ({"reasoning_content": "", "reasoning": "r"}, "r"),
        ({"reasoning_content": "c", "reasoning": "r"}, "c"),
        ({"reasoning_content": " \n\t"}, ""),
        ({"reasoning_content": None}, ""),
        ({}, ""),
    ],
)
def test_past_reasoning_is_kept_as_it_was(fields: dict[str, Any], reasoning: str) -> None:
    message = {"role": "assistant", "content": "x", "name": "n"} | fields
    with_think = (
        f'(message role="assistant" name="n"·(think·{reasoning})think·(response·x)response·)message·¶'
    )
    assert shown([message, USER], thinking=True).startswith(with_think)
    without = '(message role="assistant" name="n"·(response·x)response·)message·¶'
    assert shown([message], thinking=False) == without


def test_order_of_a_prompt() -> None:
    text = joined(
        render(
            [USER],
            tools=[WEATHER],
            effort="low",
            tool_choice="required",
            response_format={"type": "json_object"},
        )
    )
    marks = [
        "tool-declare",
        "thinking-effort",
        'role="user"',
        "tool-choice",
        "response-format",
        'role="assistant"',
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert text.endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("low", "low"),
        ("high", "high"),
        ("max", "max"),
        ("medium", "high"),
        ("minimal", "low"),
        ("xhigh", "max"),
    ],
)
def test_effort_levels(given: str, printed: str) -> None:
    assert f"`thinking_effort={printed}`." in joined(render([USER], effort=given))
    assert "thinking_effort" not in joined(render([USER], effort=given, thinking=False))
    assert "thinking_effort" not in joined(render([USER]))


def test_effort_none_switches_thinking_off() -> None:
    assert render([USER], effort="none") == render([USER], thinking=False)


@pytest.mark.parametrize("effort", ["", "LOW", "most", 3, True])
def test_unknown_effort(effort: Any) -> None:
    for thinking in (True, False):
        with pytest.raises(UsageError, match=r"thinking effort is .*expected one of 'low', 'high', 'max'"):
            render([USER], effort=effort, thinking=thinking)


@pytest.mark.parametrize(
    ("request_fields", "thinking", "effort"),
    [
        ({}, True, None),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"thinking": {"type": "enabled", "effort": "high"}, "reasoning_effort": "low"}, True, "high"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, False, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"chat_template_kwargs": {"thinking": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "max"}, True, "max"),
        ({"thinking": None, "chat_template_kwargs": None, "reasoning_effort": None}, True, None),
    ],
)
def test_thinking_object_and_effort_fields_of_a_request_count(
    request_fields: dict[str, Any], thinking: bool, effort: str | None
) -> None:
    assert request_thinking(request_fields) == (thinking, effort)


def test_default_effort_of_a_request() -> None:
    assert request_thinking({}, default="max") == (True, "max")
    assert request_thinking({"reasoning_effort": "low"}, default="max") == (True, "low")
    assert request_thinking({"thinking": {"type": "disabled"}}, default="max") == (False, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": True},
        {"thinking": {"type": "on"}},
        {"thinking": {"effort": "huge"}},
        {"reasoning_effort": 1},
        {"chat_template_kwargs": []},
        {"chat_template_kwargs": {"thinking": "no"}},
    ],
)
def test_malformed_thinking_of_a_request(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        request_thinking(fields)


def test_declaration_sorts_keys_and_keeps_lists() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"é": 1.0, "Z": ["b", "a", {"y": None, "x": '\u2028\x7f/"\\\n\x01'}]},
        },
        "A": 1e30,
    }
    text = joined(render([USER], tools=[tool]))
    shown = (
        '[{"A":1e+30,"function":{"name":"f","parameters":{"Z":["b","a",{"x":"\u2028\x7f/\\"\\\\\\n\\u0001","y":null}],'
        '"é":1.0}},"type":"function"}]'
    )
    assert f"\n\n```json\n{shown}\n```<|close|>" in text


def test_dynamic_declaration_stands_where_it_is() -> None:
    extra = {"type": "function", "function": {"name": "more"}}
    messages = [USER, {"role": "system", "content": None, "name": "n", "tools": [extra]}, USER]
    user = '(message role="user"·a)message·¶'
    body = (
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n"
        '[{"function":{"name":"more"},"type":"function"}]\n```'
    )
    assert shown(messages) == f'{user}(message role="system" type="tool-declare"·{body})message·¶{user}'
    required = shown(messages, tool_choice="required")
    assert required.endswith("`tool_choice=required`.\nYou MUST call tools in the next message.)message·¶")


def test_empty_tool_lists_declare_nothing() -> None:
    assert shown([USER, {"role": "system", "content": "s", "tools": []}], tools=[]) == (
        '(message role="user"·a)message·¶(message role="system"·s)message·¶'
    )


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"name": "r", "schema": {"b": 1, "a": 2}}, '{"a":2,"b":1}'),
        ({"name": "r", "schema": {}, "strict": True}, "{}"),
        ({"name": "r", "json_schema": {"b": 1}}, '{"b":1}'),
        ({"type": "object", "properties": {}}, '{"properties":{},"type":"object"}'),
    ],
)
def test_schema_that_is_printed(given: dict[str, Any], schema: str) -> None:
    text = shown([USER], response_format={"type": "json_schema", "json_schema": given}, strict=False)
    assert text.endswith(f"must match the following schema:\n```json\n{schema}\n```)message·¶")


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "auto"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}, "strict": False},
        {"response_format": {"type": "text"}},
    ],
)
def test_settings_that_print_nothing(options: dict[str, Any]) -> None:
    assert shown([USER], **options) == shown([USER])


@pytest.mark.parametrize(
    ("arguments", "elements"),
    [
        (None, ""),
        ("", ""),
        (" \n", ""),
        ({}, ""),
        ("{}", ""),
        ({"s": 'a<b & "c"\n'}, '(argument key="s" type="string"·a<b & "c"\n)argument·'),
        ({"s": ""}, '(argument key="s" type="string"·)argument·'),
        ({"b": True}, '(argument key="b" type="boolean"·true)argument·'),
        ({"z": None}, '(argument key="z" type="null"·null)argument·'),
        ({"n": 7}, '(argument key="n" type="number"·7)argument·'),
        ('{"n": 1e3}', '(argument key="n" type="number"·1000.0)argument·'),
        ({"o": {"k": [1, "é"]}}, '(argument key="o" type="object"·{"k": [1, "é"]})argument·'),
        ({"l": [1, {"b": 0, "a": 0}]}, '(argument key="l" type="array"·[1, {"b": 0, "a": 0}])argument·'),
        ('{"s": "\\u00e9\\n"}', '(argument key="s" type="string"·é\n)argument·'),
        ({"": 1, 'q"&': 2}, '(argument key="" type="number"·1)argument·'
         '(argument key="q&quot;&amp;" type="number"·2)argument·'),
        ('{"b": 1, "a": 2}', '(argument key="b" type="number"·1)argument·'
         '(argument key="a" type="number"·2)argument·'),
        ('{"a": 1', '(json type="object"·{"a": 1)json·'),
        ("not json <|sep|>", '(json type="object"·not json <|sep|>)json·'),
        ('{"n": NaN}', '(json type="object"·{"n": NaN})json·'),
        ('{"n": 1e999}', '(json type="object"·{"n": 1e999})json·'),
        ('{"s": "\\ud800"}', '(json type="object"·{"s": "\\ud800"})json·'),
        ("[" * 100_000, '(json type="object"·' + "[" * 100_000 + ")json·"),
    ],
)  # fmt: skip
def test_arguments_in_history(arguments: Any, elements: str) -> None:
    before = '(message role="assistant"·(response·)response·(tools·(call tool="f" index="1"·'
    assert shown([assistant(call(arguments))]) == f"{before}{elements})call·)tools·)message·¶"


def test_calls_are_numbered_and_escaped() -> None:
    text = shown([assistant(call({}, 'a&"b'), call({}, "g", id=None))])
    assert '(tools·(call tool="a&amp;&quot;b" index="1"·)call·(call tool="g" index="2"·)call·)tools·' in text


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls(calls: Any) -> None:
    assert "tools" not in shown([{"role": "assistant", "content": "x", "tool_calls": calls}])


def results_of(text: str) -> list[str]:
    """``name index content`` of each tool message."""
    found = []
    for part in text.split('(message role="tool" tool="')[1:]:
        name, _, rest = part.partition('" index="')
        index, _, content = rest.partition('"·')
        found.append(f"{name} {index} {content.partition(')')[0]}")
    return found


@pytest.mark.parametrize(
    ("messages", "results"),
    [
        ([CALLS, result("3", "c"), result("1", "a"), result("2", "b")], ["f 1 a", "g 2 b", "h 3 c"]),
        ([CALLS, result("3", "c"), result("3", "d"), result("2", "b")], ["g 1 b", "h 2 c", "h 3 d"]),
        ([CALLS, result("2", "b", name="stale", tool="stale")], ["g 1 b"]),
        ([CALLS, result(None, "b", id="2")], ["g 1 b"]),
        ([CALLS, result("3", "c"), USER, result("1", "a")], ["h 1 c", "f 2 a"]),
        ([CALLS, result("3", "c"), CALLS, result("1", "a")], ["h 1 c", "f 1 a"]),
        ([CALLS, result("3", "c"), result("?", "x", name="n")], ["f 1 c", "n 2 x"]),
        ([CALLS, result("3", "c"), result("?", "x", name="n", tool="t")], ["f 1 c", "t 2 x"]),
        ([CALLS, *[result("?", "x")] * 3], ["f 1 x", "g 2 x", "h 3 x"]),
        ([result("?", "x", name="n")], ["n 1 x"]),
        (
            [
                assistant(call({}, "f", "1"), call({}, "g", "1"), call({}, "h", "2")),
                result("2", "b"),
                result("1", "a"),
            ],
            ["f 1 a", "h 2 b"],
        ),
        ([assistant(call({}, "f", None)), result(None, "x", name="n")], ["n 1 x"]),
        ([CALLS, {"role": "assistant", "content": "x"}, result("1", "a", name="n")], ["n 1 a"]),
    ],
)
def test_tool_results(messages: list[dict[str, Any]], results: list[str]) -> None:
    assert results_of(shown(messages, strict=False)) == results


def test_tool_result_parts() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert results_of(shown([CALLS, result("1", parts), result("2", None)])) == ["f 1 xy", "g 2 "]


@pytest.mark.parametrize(
    ("thinking", "message", "end"),
    [
        (True, {"reasoning_content": "r", "content": "c"}, "(think·r)think·(response·c"),
        (True, {"content": "c"}, "(think·)think·(response·c"),
        (True, {"reasoning_content": "r", "content": ""}, "(think·r"),
        (True, {"content": None}, "(think·"),
        (False, {"reasoning_content": "r", "content": "c"}, "(response·c"),
        (False, {"reasoning_content": "r"}, "(response·"),
    ],
)
def test_partial_message_is_left_open(thinking: bool, message: dict[str, Any], end: str) -> None:
    partial = {"role": "assistant", "name": "n", "partial": True} | message
    for generation_prompt in (True, False):
        text = shown([USER, partial], thinking=thinking, add_generation_prompt=generation_prompt)
        assert text == '(message role="user"·a)message·¶(message role="assistant" name="n"·' + end


def test_settings_stand_before_a_partial_message() -> None:
    partial = {"role": "assistant", "content": "{", "partial": True}
    text = shown([USER, partial], response_format={"type": "json_object"})
    assert text.endswith(')message·¶(message role="assistant"·(response·{')
    assert text.count("response-format") == 1


def test_images_with_sizes() -> None:
    content = [image(), {"type": "text", "text": "x"}, image("image")]
    segments = render([{"role": "user", "content": content}], image_sizes=[(1024, 768), (1, 2)])
    assert segments[7:10] == [
        Segment("<|media_begin|>image 1024x768<|media_content|><|media_pad|><|media_end|>", True),
        Segment("x"),
        Segment("<|media_begin|>image 1x2<|media_content|><|media_pad|><|media_end|>", True),
    ]


@pytest.mark.parametrize("name", ["f", "_f", "é", "f" * 256, "a.b-c:0"])
def test_function_names_that_are_accepted(name: str) -> None:
    tool = {"type": "function", "function": {"name": name}}
    assert json.dumps(name, ensure_ascii=False) in joined(render([USER], tools=[tool]))


def test_nothing_given_is_changed() -> None:
    messages = [CALLS, result("2"), result("1"), {"role": "developer", "content": "x"}]
    before = json.dumps(messages)
    render(messages, tools=[WEATHER])
    assert json.dumps(messages) == before
