"""What the output parser assembles: one tag, and the arguments of one tool call.

Owns the reading of a tag's text and the writing of arguments as JSON. When a tag counts, and what becomes
of a call, is decided in ``channels``.
Source: text specification §2.10, §4.2, §4.3.
"""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from k3mlx import markers
from k3mlx.chat_json import is_json

_SPACE = " \t\n\r\f\v"  # ASCII white space
_FIRST_SPACE = re.compile(f"[{_SPACE}]+")
_ATTRIBUTE = re.compile(rf'[{_SPACE}]*([^{_SPACE}="]+)="([^"]*)"')


class Tag(NamedTuple):
    marker: str  # that starts it
    name: str
    attributes: dict[str, str]
    literal: str  # the tag spelled out


def read_tag(marker: str, data: bytes) -> Tag:
    """The tag whose bytes stood between ``marker`` and the marker that ends a tag."""
    text = data.decode("utf-8", errors="replace")
    name, *rest = _FIRST_SPACE.split(text.strip(_SPACE), maxsplit=1)
    attributes: dict[str, str] = {}
    at = 0
    while rest and (match := _ATTRIBUTE.match(rest[0], at)):
        attributes[match[1]] = match[2].replace("&quot;", '"').replace("&amp;", "&")
        at = match.end()
    return Tag(marker, name, attributes, f"{marker}{text}{markers.SEP}")


class ArgumentsWriter:
    """The arguments of one call as JSON text, written as their elements come.

    Arguments come either as ``argument`` elements or as one raw ``json`` element; what comes first decides,
    the rest is ignored. Each method returns the next fragment of the JSON text. Of a repeated key ``json``
    has the last value only; with ``keep_repeats`` it has both and equals all fragments joined.
    """

    def __init__(self, keep_repeats: bool) -> None:
        self.element = ""  # name of the open or last element
        self._keep_repeats = keep_repeats
        self._form = ""  # name of the first element
        self._ignored = False
        self._type = ""
        self._value: list[str] = []  # JSON text of the open or last value
        self._values: dict[
            tuple[str, int], list[str]
        ] = {}  # by key as JSON text, and place if repeats are kept

    def open(self, name: str, attributes: Mapping[str, str]) -> str:
        """An ``argument`` (with a key) or ``json`` element begins."""
        self.element = name
        self._ignored = bool(self._form) and "json" in (name, self._form)
        if self._ignored:
            return ""
        separator = ", " if self._form else "{"
        self._form = name
        self._value = []
        if name == "json":
            return ""
        key = _string(attributes["key"])
        self._values[key, len(self._values) if self._keep_repeats else 0] = self._value
        self._type = attributes.get("type", "string")
        quote = self._add('"') if self._type == "string" else ""
        return f"{separator}{key}: {quote}"

    def text(self, text: str) -> str:
        """Text inside the open element."""
        if self._ignored:
            return ""
        if self._form == "json":
            return self._add(text)
        if self._type == "string":
            return self._add(_string(text)[1:-1])
        self._add(text)
        return ""

    def close(self) -> str:
        """The open element ends."""
        if self._ignored or self._form == "json":
            return ""
        if self._type == "string":
            return self._add('"')
        text = "".join(self._value)
        self._value[:] = [text if is_json(text) else _string(text)]
        return self._value[0]

    def end(self) -> str:
        """The call is complete."""
        if self._form == "json":
            return ""
        return "}" if self._form else "{}"

    def json(self) -> str:
        """All of it, once the call is complete."""
        if self._form == "json":
            return "".join(self._value)
        return "{" + ", ".join(f"{key}: {''.join(value)}" for (key, _), value in self._values.items()) + "}"

    def _add(self, text: str) -> str:
        self._value.append(text)
        return text


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
