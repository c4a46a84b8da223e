"""Messages in OpenAI's form, short to write: what several tests of prompts start from."""

from typing import Any

USER = {"role": "user", "content": "a"}


def call(arguments: Any, name: str = "f", id: str | None = "x") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


def result(answers: Any, content: Any = "r", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": answers, "content": content} | more


CALLS = assistant(call({}, "f", "1"), call({}, "g", "2"), call({}, "h", "3"))


def image(kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, kind: {"url": "data:"}}
