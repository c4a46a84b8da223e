"""A request's messages, checked: what each of them says, and which call a tool result answers.

Owns the reading of OpenAI-style messages, the order of tool results and the errors about both. How a message
is written into a prompt is ``chat``'s part.
Source: text specification §2.4 to §2.7, §2.12.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from k3mlx import chat_json
from k3mlx.chat_json import short
from k3mlx.chat_protocol import check_tools
from k3mlx.errors import UsageError
from k3mlx.tokenizer import check_text

Message = Mapping[str, Any]


class Call(NamedTuple):
    id: str  # empty if it has none
    name: str
    arguments: dict[str, Any] | str  # values by key, or the raw text of what is not JSON


class Turn(NamedTuple):
    where: str  # the message's place, for errors
    message: Message
    calls: list[Call]  # of an assistant message
    called: str | None = None  # of a tool message: the function whose call it answers


def read_turns(messages: Any) -> list[Turn]:
    """The messages, shape and roles checked, ``developer`` turned into ``system``."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError(f"messages is {short(messages)}; expected a list of at least one message")
    turns = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise UsageError(f"{where} is {short(message)}; expected an object with role and content")
        role = message.get("role")
        if role == "developer":
            message = {**message, "role": "system"}
        elif role not in ("system", "user", "assistant", "tool"):
            raise UsageError(f"{where}.role is {short(role)}; expected system, user, assistant or tool")
        if message.get("partial") and (role != "assistant" or index != len(messages) - 1):
            raise UsageError(f"{where}.partial is set; expected only on a last message of the assistant")
        turns.append(Turn(where, message, _calls(message, where) if role == "assistant" else []))
    return turns


def dynamic_tools(turn: Turn, strict: bool, declared: set[str]) -> list[Any]:
    """Tools that a system message adds in mid-conversation."""
    where, message = turn.where, turn.message
    given = message.get("tools")
    if message["role"] != "system":
        if given and strict:
            raise UsageError(
                f"{where}.tools is set on a message of the {message['role']}; expected role system"
            )
        return []
    tools = check_tools(given, f"{where}.tools", strict=strict, seen=declared)
    if tools and strict and message.get("content"):
        raise UsageError(
            f"{where} declares tools and has content; expected no content, as none would be shown"
        )
    return tools


def results_in_order(turns: list[Turn], strict: bool) -> Iterator[Turn]:
    """The turns, each run of tool results in the order of the calls of the assistant message before it."""
    calls: list[Call] = []
    for role, group in groupby(turns, key=lambda turn: turn.message["role"]):
        run = list(group)
        if role == "assistant":
            calls = run[-1].calls
        yield from _in_order(run, calls, strict) if role == "tool" else run


def _in_order(run: list[Turn], calls: list[Call], strict: bool) -> list[Turn]:
    """A run of tool results sorted and named by the calls, or as it is if one of them answers no call."""
    position: dict[str, int] = {}
    for index, call in enumerate(calls):
        if call.id:
            position.setdefault(call.id, index)
    answered = [position.get(_result_id(turn, strict), -1) for turn in run]
    if -1 in answered:
        return run
    named = [turn._replace(called=calls[index].name) for index, turn in zip(answered, run, strict=True)]
    return [named[place] for place in sorted(range(len(run)), key=answered.__getitem__)]


def _result_id(turn: Turn, strict: bool) -> str:
    value = turn.message.get("tool_call_id")
    if strict and not value:
        raise UsageError(f"{turn.where} has no tool_call_id; expected the id of the call it answers")
    value = value or turn.message.get("id") or ""
    if not isinstance(value, str):
        raise UsageError(f"{turn.where}.tool_call_id is {short(value)}; expected a string")
    return value


def _calls(message: Message, where: str) -> list[Call]:
    """The tool calls of an assistant message, checked."""
    given = message.get("tool_calls")
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise UsageError(f"{where}.tool_calls is {short(given)}; expected a list")
    calls = []
    for index, call in enumerate(given):
        place = f"{where}.tool_calls[{index}]"
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise UsageError(f"{place} is {short(call)}; expected an object with id, type and function")
        function = call["function"]
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise UsageError(f"{place}.function.name is {short(name)}; expected a non-empty string")
        if not isinstance(call.get("id"), str | None):
            raise UsageError(f"{place}.id is {short(call['id'])}; expected a string")
        arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
        calls.append(Call(call.get("id") or "", name, arguments))
    return calls


def _arguments(given: Any, where: str) -> dict[str, Any] | str:
    """Values by key; the text itself if it is not JSON or its values have no text form; empty for nothing."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, str):
        raise UsageError(f"{where} is {short(given)}; expected an object or a string of JSON")
    try:
        value = chat_json.parse(given)
    except ValueError:
        return given
    if not isinstance(value, dict):
        raise UsageError(f"{where} is {short(given)}; expected the JSON of an object")
    try:
        check_text(chat_json.dump(value, where), where)
    except UsageError:  # an overflowing number, or half a surrogate pair written as an escape
        return given
    return value


def reasoning_of(turn: Turn) -> str:
    """What the assistant thought, empty if that is nothing but white space."""
    text = turn.message.get("reasoning_content") or turn.message.get("reasoning") or ""
    if not isinstance(text, str):
        raise UsageError(f"{turn.where}.reasoning_content is {short(text)}; expected a string")
    return text if text.strip() else ""


def name_of(turn: Turn) -> str | None:
    name = turn.message.get("name")
    if not isinstance(name, str | None):
        raise UsageError(f"{turn.where}.name is {short(name)}; expected a string")
    return name or None
