"""Messages to prompt segments.

Owns the order and the form of everything in a prompt: messages, reasoning, tool calls, tool results, the
generation prompt. Never sees ids: markers are the only segments in which special names count, so text from a
user, a tool or a model stays text. Reading and checking messages is ``chat_turns``, the sentences of protocol
messages are ``chat_protocol``, the way back from the model's output is ``channels``.
Source: text specification §2.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from k3mlx import chat_json, markers
from k3mlx import chat_protocol as protocol
from k3mlx.chat_json import short
from k3mlx.chat_turns import (
    Call,
    Message,
    Turn,
    dynamic_tools,
    name_of,
    read_turns,
    reasoning_of,
    results_in_order,
)
from k3mlx.errors import UsageError
from k3mlx.tokenizer import check_text


class Segment(NamedTuple):
    """A piece of prompt that is encoded on its own; special names in it count only if ``allow_special``."""

    text: str
    allow_special: bool = False


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: Any = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    image_sizes: Sequence[tuple[int, int]] | None = None,
    strict: bool = True,
) -> list[Segment]:
    """The prompt of a conversation in OpenAI's message form, as segments for ``Tokenizer.encode_segments``.

    thinking: past and next answers have a reasoning part.
    effort: how much to think, ``low``, ``high`` or ``max``; ``minimal``, ``medium`` and ``xhigh`` map to
    these, ``none`` switches thinking off, None prints nothing about it.
    tool_choice: ``auto``, ``none`` or ``required``.
    response_format: an object with type ``text``, ``json_object`` or ``json_schema``.
    add_generation_prompt: open the assistant's next message. A last assistant message with ``partial: True``
    is left open instead, to be continued.
    image_sizes: (width, height) in pixels of each image part, in order; without it image parts are refused.
    strict: refuse also what has a rendering but the hosted service refuses: tool results without
    ``tool_call_id``, names declared twice, a schema without a name and the like.

    Raises UsageError naming the message and the field. Source: text specification §2.
    """
    thinking, effort = protocol.thinking_mode(thinking, effort)
    turns = read_turns(messages)
    declared: set[str] = set()
    tools = protocol.check_tools(tools, "tools", strict=strict, seen=declared)
    has_tools = bool(tools)
    for turn in turns:
        has_tools |= bool(dynamic_tools(turn, strict, declared))
    settings = [
        ("tool-choice", protocol.choice_body(tool_choice, strict=strict, has_tools=has_tools)),
        ("response-format", protocol.format_body(response_format, strict=strict)),
    ]

    out = _Writer(thinking, image_sizes)
    if tools:
        out.protocol("tool-declare", protocol.declaration(tools))
    if effort:
        out.protocol("thinking-effort", protocol.effort_body(effort))
    unfinished = turns.pop() if turns[-1].message.get("partial") else None
    _conversation(out, turns, strict)
    for kind, body in settings:
        if body is not None:
            out.protocol(kind, body)
    if unfinished:
        _open_assistant(out, unfinished)
    elif add_generation_prompt:
        out.open("message", role="assistant")
        out.open("think" if thinking else "response")
    out.finish()
    return out.segments


class _Writer:
    """Collects segments; one method for each primitive of the format."""

    def __init__(self, thinking: bool, image_sizes: Sequence[tuple[int, int]] | None) -> None:
        self.segments: list[Segment] = []
        self.thinking = thinking
        self._sizes = None if image_sizes is None else list(image_sizes)
        self._images = 0

    def _marker(self, name: str) -> None:
        self.segments.append(Segment(name, allow_special=True))

    def text(self, text: str, where: str = "text") -> None:
        """Plain text, its own segment."""
        if text:
            check_text(text, where)
            self.segments.append(Segment(text))

    def open(self, tag: str, **attributes: str | int | None) -> None:
        """An opening tag; attributes that are None are left out."""
        self._marker(markers.OPEN)
        self.text(tag)
        for name, value in attributes.items():
            if value is not None:
                self.text(f" {name}")
                self.text('="')
                self.text(str(value).replace("&", "&amp;").replace('"', "&quot;"), f"attribute {name}")
                self.text('"')
        self._marker(markers.SEP)

    def close(self, tag: str) -> None:
        self._marker(markers.CLOSE)
        self.text(tag)
        self._marker(markers.SEP)

    def end_message(self) -> None:
        self.close("message")
        self._marker(markers.END_OF_MSG)

    def protocol(self, kind: str, body: str) -> None:
        """A system message that carries a setting."""
        self.open("message", role="system", type=kind)
        self.text(body, f"the {kind} message")
        self.end_message()

    def content(self, content: Any, where: str) -> None:
        """Message content: a string, None, or a list of text and image parts."""
        if isinstance(content, list | tuple):
            for index, part in enumerate(content):
                self._part(part, f"{where}[{index}]")
        elif isinstance(content, str):
            self.text(content, where)
        elif content is not None:
            raise UsageError(f"{where} is {short(content)}; expected a string, null or a list of parts")

    def _part(self, part: Any, where: str) -> None:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            self.text(part["text"], where)
        elif kind in ("image", "image_url"):
            self._image(where)
        else:
            raise UsageError(f"{where} is {short(part)}; expected a part with type 'text' and a text string")

    def _image(self, where: str) -> None:
        if self._sizes is None:
            raise UsageError(f"{where} is an image; only text is supported: remove the image")
        if self._images == len(self._sizes):
            raise UsageError(
                f"{where} is image number {self._images + 1}, but only {self._images} sizes were given"
            )
        width, height = self._sizes[self._images]
        self._images += 1
        begin, middle = markers.MEDIA_BEGIN, markers.MEDIA_CONTENT
        self._marker(f"{begin}image {width:d}x{height:d}{middle}{markers.MEDIA_PAD}{markers.MEDIA_END}")

    def finish(self) -> None:
        if self._sizes is not None and self._images != len(self._sizes):
            raise UsageError(f"{len(self._sizes)} image sizes were given for {self._images} image parts")


def _conversation(out: _Writer, turns: list[Turn], strict: bool) -> None:
    calls: list[Call] = []  # of the last assistant message
    results = 0  # tool messages since
    for turn in results_in_order(turns, strict):
        role = turn.message["role"]
        if role == "assistant":
            calls, results = turn.calls, 0
            _assistant(out, turn)
        elif role == "tool":
            results += 1
            _result(out, turn, results, calls)
        elif role == "system" and turn.message.get("tools"):
            out.protocol("tool-declare", protocol.declaration(turn.message["tools"], dynamic=True))
        else:
            out.open("message", role=role, name=name_of(turn))
            out.content(turn.message.get("content"), f"{turn.where}.content")
            out.end_message()


def _result(out: _Writer, turn: Turn, number: int, calls: list[Call]) -> None:
    """A tool message, ``number`` counting from 1 after the assistant message that made ``calls``."""
    name = turn.called or turn.message.get("tool") or name_of(turn)
    if not name and number <= len(calls):
        name = calls[number - 1].name
    if not isinstance(name, str):
        raise UsageError(f"{turn.where} answers no call and names no tool; expected a matching tool_call_id")
    out.open("message", role="tool", tool=name, index=number)
    out.content(turn.message.get("content"), f"{turn.where}.content")
    out.end_message()


def _assistant(out: _Writer, turn: Turn) -> None:
    out.open("message", role="assistant", name=name_of(turn))
    if out.thinking:
        out.open("think")
        out.text(reasoning_of(turn), f"{turn.where}.reasoning_content")
        out.close("think")
    out.open("response")
    out.content(turn.message.get("content"), f"{turn.where}.content")
    out.close("response")
    if turn.calls:
        out.open("tools")
        for index, call in enumerate(turn.calls, 1):
            _call(out, call, index, f"{turn.where}.tool_calls[{index - 1}].function.arguments")
        out.close("tools")
    out.end_message()


def _open_assistant(out: _Writer, turn: Turn) -> None:
    """An assistant message left open where its text stops: in the answer, else in the reasoning."""
    content = turn.message.get("content")
    if turn.calls:
        raise UsageError(f"{turn.where} is partial and has tool_calls; expected only text to be continued")
    out.open("message", role="assistant", name=name_of(turn))
    if out.thinking:
        out.open("think")
        out.text(reasoning_of(turn), f"{turn.where}.reasoning_content")
        if not content:
            return
        out.close("think")
    out.open("response")
    out.content(content, f"{turn.where}.content")


def _call(out: _Writer, call: Call, index: int, where: str) -> None:
    out.open("call", tool=call.name, index=index)
    if isinstance(call.arguments, str):
        out.open("json", type="object")
        out.text(call.arguments, where)
        out.close("json")
    else:
        for key, value in call.arguments.items():
            kind = chat_json.kind(value)
            if not isinstance(key, str) or kind is None:
                raise UsageError(f"{where} holds {short(key)}: {short(value)}; expected JSON keys and values")
            out.open("argument", key=key, type=kind)
            out.text(value if kind == "string" else chat_json.dump(value, where), where)
            out.close("argument")
    out.close("call")
