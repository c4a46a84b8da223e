"""Request bodies, checked and turned into what the worker needs.

Owns which fields count, their ranges and the errors about them. A field that would change the answer and is
not supported is refused; one that is only about bookkeeping is ignored. Renders no prompt.
Source: text specification §2.12, §2.13, §3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3mlx.chat_json import parse, short
from k3mlx.chat_protocol import request_thinking
from k3mlx.errors import UsageError

from .failures import ApiError, invalid

MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. max_tokens is what it gets if it does not say."""

    body_bytes: int = 16_000_000
    messages: int = 4096
    queue: int = 64
    max_tokens: int = 32_768


@dataclass(frozen=True)
class Ask:
    """A request, checked as far as that goes without the model.

    prompt: plain text or ids of a completion; messages and render: arguments of `chat.render`.
    sampling: values by name, None where the model's own apply. user: for fairness between clients.
    function: the one function that tool_choice names.
    """

    kind: str  # chat or text
    stream: bool
    include_usage: bool
    max_tokens: int
    sampling: Mapping[str, float | int | None]
    stop: tuple[str, ...]
    top_logprobs: int | None
    user: str = ""
    messages: tuple[Any, ...] = ()
    render: Mapping[str, Any] = field(default_factory=dict)
    one_call: bool = False
    function: str | None = None
    prompt: str | tuple[int, ...] = ""
    echo: bool = False


def read_json(data: bytes) -> dict[str, Any]:
    """The object of a body."""
    try:
        value = parse(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8 (byte {error.start}); expected JSON") from None
    except ValueError as error:
        raise invalid(None, f"the body is not JSON ({error}); expected an object") from None
    if not isinstance(value, dict):
        raise invalid(None, f"the body is {short(value)}; expected a JSON object")
    return value


def read_chat(body: Mapping[str, Any], limits: Limits, model: str) -> Ask:
    """A body of /v1/chat/completions."""
    fields = _Fields(body)
    fields.model(model)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", f"messages is {short(messages)}; expected a list of at least one message")
    if len(messages) > limits.messages:
        raise invalid("messages", f"{len(messages)} messages; expected at most {limits.messages}")
    for name in ("functions", "function_call"):
        fields.refuse(name, None, [], "none", "auto", why="use tools and tool_choice")
    fields.refuse("modalities", None, ["text"], why="only text is supported")
    fields.refuse("audio", None, why="only text is supported")
    try:
        thinking, effort = request_thinking(body)
    except UsageError as error:
        raise invalid(None, str(error)) from None
    function = _named_function(body.get("tool_choice"))
    top = fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if not fields.flag("logprobs"):
        if top:
            raise invalid("top_logprobs", "top_logprobs is set; expected logprobs: true along with it")
        top = None
    else:
        top = top or 0
    limit = fields.whole("max_completion_tokens", 1) or fields.whole("max_tokens", 1)
    return Ask(
        kind="chat",
        messages=tuple(messages),
        render={
            "tools": body.get("tools"),
            "tool_choice": None if function else body.get("tool_choice"),
            "response_format": body.get("response_format"),
            "thinking": thinking,
            "effort": effort,
        },
        one_call=not fields.flag("parallel_tool_calls", True) or function is not None,
        function=function,
        max_tokens=limit or limits.max_tokens,
        top_logprobs=top,
        **fields.common(),
    )


def _named_function(choice: Any) -> str | None:
    """The name in a tool_choice that is an object."""
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise invalid("tool_choice", f"tool_choice is {short(choice)}; expected type function and its name")
    return name


def read_text(body: Mapping[str, Any], limits: Limits, model: str) -> Ask:
    """A body of /v1/completions."""
    fields = _Fields(body)
    fields.model(model)
    fields.refuse("suffix", None, "", why="text is only continued")
    fields.refuse("best_of", None, 1, why="one completion is made")
    return Ask(
        kind="text",
        prompt=_prompt(body.get("prompt")),
        max_tokens=fields.whole("max_tokens", 1) or 16,
        top_logprobs=fields.whole("logprobs", 0, MAX_TOP_LOGPROBS),
        echo=fields.flag("echo"),
        **fields.common(),
    )


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, list) and len(given) == 1 and not _is_id(given[0]):
        given = given[0]  # a batch of one
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(map(_is_id, given)):
        return tuple(given)
    raise invalid(
        "prompt", f"prompt is {short(given)}; expected one non-empty string or one list of token ids"
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Fields:
    """The fields of a body by type and range; every complaint names the field."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def model(self, served: str) -> None:
        """The model that is asked for is the one that is served."""
        name = self.text("model")
        if name not in (None, served, "default"):
            raise ApiError(
                404,
                f"model {short(name)} is not served here; expected {served!r}",
                code="model_not_found",
                param="model",
            )

    def common(self) -> dict[str, Any]:
        """What chats and completions share, by the names of `Ask`."""
        self.refuse("n", None, 1, why="one answer is made")
        for name in ("presence_penalty", "frequency_penalty"):
            self.refuse(name, None, 0, why="penalties are not supported")
        self.refuse("repetition_penalty", None, 1, why="penalties are not supported")
        self.refuse("logit_bias", None, {}, why="biases are not supported")
        options = self.body.get("stream_options")
        if options is not None and not isinstance(options, dict):
            raise invalid("stream_options", f"stream_options is {short(options)}; expected an object")
        seed = self.whole("seed")
        return {
            "stream": self.flag("stream"),
            "include_usage": _Fields(options or {}).flag("include_usage"),
            "sampling": {
                "temp": self.number("temperature", 0, 2),
                "top_p": self.number("top_p", 0, 1),
                "top_k": self.whole("top_k", 0, 1 << 31),
                "min_p": self.number("min_p", 0, 1),
                "seed": None if seed is None else seed % (1 << 64),
            },
            "stop": self.stops(),
            "user": self.text("user") or "",
        }

    def stops(self) -> tuple[str, ...]:
        given = self.body.get("stop")
        strings = [given] if isinstance(given, str) else [] if given is None else given
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise invalid("stop", f"stop is {short(given)}; expected a non-empty string or a list of such")
        if len(strings) > MAX_STOPS or any(len(s) > MAX_STOP_BYTES for s in strings):
            raise invalid("stop", f"expected at most {MAX_STOPS} strings of {MAX_STOP_BYTES} characters")
        return tuple(strings)

    def refuse(self, name: str, *neutral: Any, why: str) -> None:
        """Only the values that change nothing are accepted."""
        value = self.body.get(name)
        if isinstance(value, bool) or value not in neutral:
            raise invalid(name, f"{name} is {short(value)}; {why}", code="unsupported_parameter")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(name, f"{name} is {short(value)}; expected true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self.body.get(name)
        if not isinstance(value, str | None):
            raise invalid(name, f"{name} is {short(value)}; expected a string")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise invalid(name, f"{name} is {short(value)}; expected a number from {low} to {high}")
        return float(value)

    def whole(self, name: str, low: float = -math.inf, high: float = math.inf) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if not _is_id(value) or not low <= value <= high:
            between = f" of at least {low}" if high == math.inf else f" from {low} to {high}"
            raise invalid(
                name,
                f"{name} is {short(value)}; expected a whole number{'' if low == -math.inf else between}",
            )
        return int(value)
