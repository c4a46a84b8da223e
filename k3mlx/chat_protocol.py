"""The system messages that carry a request's settings, and the checks of those settings.

Owns the fixed sentences of tool declarations, thinking effort, tool choice and response format, and what a
request may ask for. Where such a message stands, and how it becomes segments, is ``chat``'s part.
Source: text specification §2.3, §2.8, §2.12, §2.13.
"""

from collections.abc import Mapping
from typing import Any

from k3mlx.chat_json import dump_sorted, short
from k3mlx.errors import UsageError

EFFORTS = {"low": "low", "high": "high", "max": "max", "medium": "high", "minimal": "low", "xhigh": "max"}

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel "
    "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICE = "The system is invoked with `tool_choice={}`.\nYou {} in the next message."
_DEMANDS = {"required": "MUST call tools", "none": "MUST NOT call any tools"}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def declaration(tools: list[Any], *, dynamic: bool = False) -> str:
    """Body of a tool declaration; ``dynamic`` for one in mid-conversation."""
    return (_MORE_TOOLS if dynamic else _TOOLS).format(dump_sorted(tools, "tools"))


def effort_body(effort: str) -> str:
    return _EFFORT.format(effort)


def choice_body(tool_choice: Any, *, strict: bool, has_tools: bool) -> str | None:
    """Body of the tool-choice message, None where nothing is printed (absent, ``auto``, a named function)."""
    if tool_choice is None or tool_choice == "auto":
        return None
    if isinstance(tool_choice, Mapping) and not strict:
        return None
    if not isinstance(tool_choice, str) or tool_choice not in _DEMANDS:
        raise UsageError(f"tool_choice is {short(tool_choice)}; expected 'auto', 'none' or 'required'")
    if strict and tool_choice == "required" and not has_tools:
        raise UsageError(
            "tool_choice is 'required' but no tools are declared; expected a non-empty tools list"
        )
    return _CHOICE.format(tool_choice, _DEMANDS[tool_choice])


def format_body(response_format: Any, *, strict: bool) -> str | None:
    """Body of the response-format message, None for absent or ``text``."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _FORMAT.format(kind)
    if kind == "json_schema":
        schema = _schema(response_format.get("json_schema"), strict)
        return _FORMAT.format(kind) + _SCHEMA.format(dump_sorted(schema, "response_format.json_schema"))
    raise UsageError(
        f"response_format is {short(response_format)}; "
        "expected an object with type 'text', 'json_object' or 'json_schema'"
    )


def _schema(described: Any, strict: bool) -> Any:
    """The schema to print: ``schema``, else ``json_schema`` of the description, else the description."""
    where = "response_format.json_schema"
    if not isinstance(described, Mapping):
        raise UsageError(f"{where} is {short(described)}; expected an object with name and schema")
    if strict:
        if not isinstance(described.get("name"), str) or not described["name"]:
            raise UsageError(f"{where}.name is {short(described.get('name'))}; expected a non-empty string")
        if not isinstance(described.get("schema"), Mapping):
            raise UsageError(
                f"{where}.schema is {short(described.get('schema'))}; expected a JSON Schema object"
            )
        if not isinstance(described.get("strict"), bool | None):
            raise UsageError(f"{where}.strict is {short(described['strict'])}; expected true or false")
    for key in ("schema", "json_schema"):
        if described.get(key) is not None:
            return described[key]
    return described


def thinking_mode(thinking: bool, effort: str | None) -> tuple[bool, str | None]:
    """(thinking, effort as printed) from the two settings; ``none`` switches thinking off."""
    if effort is None or effort == "none":
        return thinking and effort is None, None
    if not isinstance(effort, str) or effort not in EFFORTS:
        expected = ", ".join(repr(name) for name in (*EFFORTS, "none"))
        raise UsageError(f"thinking effort is {short(effort)}; expected one of {expected}")
    return thinking, EFFORTS[effort] if thinking else None


def request_thinking(request: Mapping[str, Any], default: str | None = None) -> tuple[bool, str | None]:
    """(thinking, effort) for ``render`` from the fields of an OpenAI chat request.

    ``thinking.effort`` wins over ``reasoning_effort``; ``default`` is the effort where neither is given.
    ``thinking.type: disabled``, ``reasoning_effort: none`` and a false ``thinking`` or ``enable_thinking`` in
    ``chat_template_kwargs`` switch thinking off (text specification §2.13).
    """
    options = _object(request, "thinking")
    template = _object(request, "chat_template_kwargs")
    kind = options.get("type")
    if kind not in (None, "enabled", "disabled"):
        raise UsageError(f"thinking.type is {short(kind)}; expected 'enabled' or 'disabled'")
    thinking = kind != "disabled"
    for key in ("thinking", "enable_thinking"):
        if not isinstance(template.get(key), bool | None):
            raise UsageError(f"chat_template_kwargs.{key} is {short(template[key])}; expected true or false")
        thinking = thinking and template.get(key) is not False
    given = [options.get("effort"), request.get("reasoning_effort")]
    effort = next((value for value in given if value is not None), default)
    return thinking_mode(thinking, effort)


def _object(request: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = request.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{key} is {short(value)}; expected an object")
    return value


def check_tools(tools: Any, where: str, *, strict: bool, seen: set[str]) -> list[Any]:
    """``tools`` as a list (empty for None), its items checked; ``seen`` collects the names declared."""
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise UsageError(f"{where} is {short(tools)}; expected a list of tool objects")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"{where}[{index}]", strict, seen)
    return list(tools)


def _check_tool(tool: Any, where: str, strict: bool, seen: set[str]) -> None:
    if not isinstance(tool, Mapping):
        raise UsageError(f"{where} is {short(tool)}; expected an object with type and function")
    if not strict:
        return
    if tool.get("type") != "function":
        raise UsageError(f"{where}.type is {short(tool.get('type'))}; expected 'function'")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise UsageError(f"{where}.function is {short(function)}; expected an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not (name[:1].isalpha() or name[:1] == "_") or len(name) > 256:
        raise UsageError(
            f"{where}.function.name is {short(name)}; expected a string that starts with a letter or '_', "
            "at most 256 characters long"
        )
    if name in seen:
        raise UsageError(f"{where}.function.name {name!r} is declared twice; expected distinct names")
    seen.add(name)
