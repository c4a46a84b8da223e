"""What a conversation or a request may not contain, and that the refusal names the place."""

from typing import Any

import pytest

from k3mlx.chat import render
from k3mlx.errors import UsageError
from tests.messages import CALLS, USER, assistant, call, image, result


@pytest.mark.parametrize(
    ("sizes", "finding"),
    [
        ([], r"messages\[0\]\.content\[0\] is image number 1, but only 0 sizes were given"),
        ([(1, 2), (3, 4)], "2 image sizes were given for 1 image parts"),
    ],
)
def test_one_size_for_each_image(sizes: list[tuple[int, int]], finding: str) -> None:
    with pytest.raises(UsageError, match=finding):
        render([{"role": "user", "content": [image()]}], image_sizes=sizes)


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_images_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UsageError, match=r"messages\[1\]\.content\[0\] is an image; only text is supported"):
        render([USER, {"role": "user", "content": [image(kind)]}])


TOOL = {"type": "function", "function": {"name": "f"}}
LAST = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages is"),
        (None, "messages is None"),
        ("hi", "messages is 'hi'"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([{"content": "x"}], r"messages\[0\]\.role is None"),
        ([USER, {"role": "bot"}], r"messages\[1\]\.role is 'bot'; expected system, user"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is 5"),
        ([{"role": "user", "content": {"text": "x"}}], r"messages\[0\]\.content is"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] is 'x'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\] is"),
        ([{"role": "user", "content": "x", "name": 5}], r"messages\[0\]\.name is 5"),
        ([{"role": "user", "content": "a\ud800"}], r"content holds the lone surrogate U\+D800"),
        ([{"role": "user", "content": "x", "name": "\ud800"}], "attribute name holds the lone surrogate"),
        ([{"role": "assistant", "reasoning_content": ["x"]}], r"messages\[0\]\.reasoning_content is"),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\]\.tool_calls is \{\}"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"messages\[0\]\.tool_calls\[0\] is 'f'"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r"tool_calls\[0\] is"),
        ([assistant(call({}, ""))], r"tool_calls\[0\]\.function\.name is ''"),
        ([assistant(call({}, id=5))], r"tool_calls\[0\]\.id is 5"),
        ([assistant(call("[1]"))], r"function\.arguments is '\[1\]'; expected the JSON of an object"),
        ([assistant(call("null"))], r"function\.arguments is 'null'"),
        ([assistant(call(5))], r"function\.arguments is 5"),
        ([assistant(call({1: 2}))], "expected JSON keys and values"),
        ([assistant(call({"a": {2}}))], "expected JSON keys and values"),
        ([assistant(call({"a": [{2}]}))], "cannot be written as JSON"),
        ([USER, assistant(call({}), call({"a": "\ud800"}))], r"messages\[1\]\.tool_calls\[1\]\..* holds"),
        ([assistant(call({"a": float("inf")}))], "cannot be written as JSON"),
        ([result("1")], "answers no call and names no tool"),
        ([CALLS, *[result("?")] * 4], r"messages\[4\] answers no call and names no tool"),
        ([CALLS, result(7)], r"messages\[1\]\.tool_call_id is 7"),
        ([CALLS, result("?", tool=5)], "answers no call and names no tool"),
        ([{**LAST, "partial": True}, USER], r"messages\[0\]\.partial is set"),
        ([{**USER, "partial": True}], r"messages\[0\]\.partial is set"),
        ([{**CALLS, "partial": True}], r"messages\[0\] is partial and has tool_calls"),
        ([{"role": "system", "tools": {}}], r"messages\[0\]\.tools is \{\}"),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_rendered(messages: Any, field: str) -> None:
    for strict in (True, False):
        with pytest.raises(UsageError, match=field) as caught:
            render(messages, strict=strict)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": {}}, r"tools is \{\}"),
        ({"tools": ["f"]}, r"tools\[0\] is 'f'"),
        ({"tools": [{**TOOL, "x": {2}}]}, "tools cannot be written as JSON"),
        ({"tools": [{**TOOL, "x": float("nan")}]}, "tools cannot be written as JSON"),
        ({"tools": [{**TOOL, "x": "\ud800"}]}, "tool-declare message holds the lone surrogate"),
        ({"tool_choice": "any"}, "tool_choice is 'any'"),
        ({"tool_choice": 5}, "tool_choice is 5"),
        ({"response_format": "json"}, "response_format is 'json'"),
        ({"response_format": {}}, r"response_format is \{\}"),
        ({"response_format": {"type": "xml"}}, "response_format is"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is None"),
    ],
)
def test_settings_that_cannot_be_rendered(options: dict[str, Any], field: str) -> None:
    for strict in (True, False):
        with pytest.raises(UsageError, match=field):
            render([USER], strict=strict, **options)


def schema(**fields: Any) -> dict[str, Any]:
    described = {"name": "r", "schema": {}} | fields
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in described.items() if value != "-"},
    }


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([USER], {"tools": [{"function": {"name": "f"}}]}, r"tools\[0\]\.type is None"),
        ([USER], {"tools": [{"type": "code", "function": {"name": "f"}}]}, r"tools\[0\]\.type is 'code'"),
        ([USER], {"tools": [{"type": "function"}]}, r"tools\[0\]\.function is None"),
        ([USER], {"tools": [{"type": "function", "function": {}}]}, r"function\.name is None"),
        ([USER], {"tools": [{"type": "function", "function": {"name": "1f"}}]}, r"function\.name is '1f'"),
        ([USER], {"tools": [{"type": "function", "function": {"name": ""}}]}, r"function\.name is ''"),
        (
            [USER],
            {"tools": [{"type": "function", "function": {"name": "f" * 257}}]},
            r"function\.name is 'ff",
        ),
        ([USER], {"tools": [TOOL, TOOL]}, r"tools\[1\]\.function\.name 'f' is declared twice"),
        (
            [{"role": "system", "tools": [TOOL]}],
            {"tools": [TOOL]},
            r"messages\[0\]\.tools\[0\].*declared twice",
        ),
        (
            [{"role": "user", "content": "", "tools": [TOOL]}],
            {},
            "on a message of the user; expected role system",
        ),
        (
            [{"role": "system", "content": "x", "tools": [TOOL]}],
            {},
            r"messages\[0\] declares tools and has content",
        ),
        ([CALLS, result(None, name="f")], {}, r"messages\[1\] has no tool_call_id"),
        ([USER], {"tool_choice": "required"}, "'required' but no tools are declared"),
        ([USER], {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice is {'type'"),
        ([USER], {"response_format": schema(name="-")}, r"json_schema\.name is None"),
        ([USER], {"response_format": schema(name="")}, r"json_schema\.name is ''"),
        ([USER], {"response_format": schema(schema="-")}, r"json_schema\.schema is None"),
        ([USER], {"response_format": schema(strict="yes")}, r"json_schema\.strict is 'yes'"),
    ],
)
def test_requests_that_only_strict_refuses(messages: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        render(messages, **options)
    assert render(messages, strict=False, **options)
