"""The model's output to channels: reasoning, answer, tool calls.

Owns the parser and its events. It eats pieces, never decoded text: the names of special ids (``str``) and
the bytes of ordinary ids (``bytes``), so text that merely spells a marker stays text.
Source: text specification §2.10, §4.2, §4.3.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from k3mlx import markers
from k3mlx.channel_parts import ArgumentsWriter, Tag, read_tag
from k3mlx.markers import CLOSE, OPEN, SEP
from k3mlx.tokenizer import StreamDecoder

MAX_TAG = 4096  # bytes between the markers of a tag; more is not a tag


@dataclass(frozen=True)
class Text:
    """More text of a channel, ``think`` or ``response``: complete characters, never empty."""

    channel: str
    text: str


@dataclass(frozen=True)
class CallStarted:
    """A call begins. ``index`` counts from 0; the name is whole."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    fragment: str


@dataclass(frozen=True)
class CallClosed:
    """A call is complete. ``arguments`` is its whole JSON text, equal to its fragments joined."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True)
class CallDropped:
    """A call that was announced will not be completed."""

    index: int


Event = Text | CallStarted | CallArguments | CallClosed | CallDropped

# (mode, marker, tag name) -> next mode. Other tags are text in the modes that collect text, else ignored.
_NEXT = {
    ("think", OPEN, "think"): "think",
    ("think", OPEN, "response"): "response",
    ("think", OPEN, "tools"): "tools",
    ("think", CLOSE, "think"): "between",
    ("think", CLOSE, "response"): "between",
    ("response", OPEN, "think"): "response",
    ("response", OPEN, "response"): "response",
    ("response", OPEN, "tools"): "tools",
    ("response", CLOSE, "think"): "response",
    ("response", CLOSE, "response"): "between",
    ("message", OPEN, "think"): "think",
    ("message", OPEN, "response"): "response",
    ("message", OPEN, "tools"): "tools",
    ("between", OPEN, "think"): "think",
    ("between", OPEN, "response"): "response",
    ("between", OPEN, "tools"): "tools",
    ("tools", OPEN, "response"): "response",
    ("tools", OPEN, "call"): "call",
    ("tools", CLOSE, "tools"): "between",
    ("call", OPEN, "argument"): "value",
    ("call", OPEN, "json"): "value",
    ("call", CLOSE, "call"): "tools",
    ("call", CLOSE, "tools"): "between",
    ("value", CLOSE, "argument"): "call",
    ("value", CLOSE, "json"): "call",
    ("value", CLOSE, "call"): "tools",
    ("value", CLOSE, "tools"): "between",
}


def start_mode(segments: Iterable[tuple[str, bool]]) -> str:
    """The mode in which the output begins, from the prompt's (text, allow_special) segments.

    ``think`` or ``response`` if that is the last element the prompt leaves open, else ``message``.
    """
    open_elements: list[str] = []
    opening = False
    for text, allow_special in segments:
        if opening:
            open_elements.append(text)
        elif allow_special and text == CLOSE:
            del open_elements[-1:]
        opening = allow_special and text == OPEN
    return open_elements[-1] if open_elements and open_elements[-1] in ("think", "response") else "message"


class OutputParser:
    """State machine over the pieces of one assistant message.

    ``start`` is the ``start_mode`` of the prompt. Feed every piece (``Tokenizer.piece``), use the events
    that come back, and call ``finish`` when generation ends, for whatever reason.

    With ``stream_arguments`` a call is announced when its opening tag is complete and its arguments come as
    they are written; it may still be dropped, and a repeated key stands twice in its JSON. Without, all the
    events of a call come together when it is complete, and of a repeated key the last value counts.

    Attributes
    ----------
    ended: the message was closed; False means that generation stopped early.
    dropped_calls: number of calls that were not completed or had no name.
    calls, reasoning, content: all of it so far.
    """

    def __init__(self, start: str, *, stream_arguments: bool = False) -> None:
        if start not in ("think", "response", "message"):
            raise ValueError(f"start is {start!r}; expected 'think', 'response' or 'message'")
        self.ended = False
        self.dropped_calls = 0
        self.calls: list[CallClosed] = []
        self._texts: dict[str, list[str]] = {"think": [], "response": []}
        self._blank = True  # the response has nothing but white space so far
        self._before: list[str] | None = [] if start == "message" else None  # text before any channel opened
        self._mode = start
        self._decoder = StreamDecoder()
        self._marker = ""  # that started the tag being read, empty outside tags
        self._tag = bytearray()
        self._stream = stream_arguments
        self._name = ""  # of the open call
        self._index = 0  # of the open or next call
        self._writer = ArgumentsWriter(stream_arguments)
        self._events: list[Event] = []

    @property
    def mode(self) -> str:
        """Where the output stands: ``think``, ``response``, ``tools``, ``between`` and so on."""
        return self._mode

    @property
    def in_tag(self) -> bool:
        """A tag has begun, so that an ordinary token adds to it and not to a channel."""
        return bool(self._marker)

    @property
    def reasoning(self) -> str:
        return "".join(self._texts["think"])

    @property
    def content(self) -> str:
        return "".join(self._texts["response"])

    def feed(self, piece: bytes | str) -> list[Event]:
        """Events of a piece: bytes of ordinary tokens, cut anywhere, or the name of one special id."""
        if self._mode != "done":
            if isinstance(piece, bytes):
                self._ordinary(piece)
            else:
                self._special(piece)
        return self._take_events()

    def finish(self) -> list[Event]:
        """Events of the end of generation. Unfinished reasoning stays reasoning, half a call is dropped."""
        if self._mode != "done":
            self._text(self._decoder.flush())
            self._stop()
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _ordinary(self, data: bytes) -> None:
        if not self._marker:
            self._text(self._decoder.feed(data))
            return
        self._tag += data
        if len(self._tag) > MAX_TAG:
            self._not_a_tag()

    def _special(self, name: str) -> None:
        self._text(self._decoder.flush())
        if name in markers.STOPS:
            self._end()
        elif name in (OPEN, CLOSE):
            self._not_a_tag()
            self._marker = name
        elif name == SEP and self._marker:
            tag = read_tag(self._marker, bytes(self._tag))
            self._forget_tag()
            self._complete_tag(tag)
        elif self._marker:
            self._ordinary(name.encode())
        else:
            self._text(name)

    def _not_a_tag(self) -> None:
        """What follows a marker turned out to be text."""
        if self._marker:
            text = self._marker + self._tag.decode("utf-8", errors="replace")
            self._forget_tag()
            self._text(text)

    def _forget_tag(self) -> None:
        self._marker = ""
        self._tag.clear()

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._mode in self._texts:
            self._texts[self._mode].append(text)
            self._events.append(Text(self._mode, text))
            if self._mode == "response":
                self._blank = self._blank and text.isspace()
        elif self._mode == "value":
            self._fragment(self._writer.text(text))
        elif self._mode == "message" and self._before is not None:
            self._before.append(text)

    def _complete_tag(self, tag: Tag) -> None:
        if tag[:2] == (CLOSE, "message"):
            self._end()
            return
        before, mode = self._mode, self._next_mode(tag)
        if mode is None:
            if before in self._texts or before == "value":
                self._text(tag.literal)
            return
        self._mode = mode
        if mode == "value":
            self._fragment(self._writer.open(tag.name, tag.attributes))
        elif before == "value" and mode == "call":
            self._fragment(self._writer.close())
        elif mode == "call":
            self._start_call(tag.attributes.get("tool", ""))
        elif before == "call" and mode == "tools":
            self._close_call()
        elif before in ("call", "value"):
            self._drop_call()
        else:
            self._before = None

    def _next_mode(self, tag: Tag) -> str | None:
        mode = _NEXT.get((self._mode, tag.marker, tag.name))
        if self._mode == "response" and tag[:2] == (OPEN, "think") and self._blank:
            return "think"
        if mode == "value" and tag.name == "argument" and "key" not in tag.attributes:
            return None
        if self._mode == "value" and mode == "call" and tag.name != self._writer.element:
            return None
        return mode

    def _start_call(self, name: str) -> None:
        self._name = name
        self._writer = ArgumentsWriter(self._stream)
        if self._stream and name:
            self._events.append(CallStarted(self._index, name))

    def _fragment(self, text: str) -> None:
        if self._stream and self._name and text:
            self._events.append(CallArguments(self._index, text))

    def _close_call(self) -> None:
        if not self._name:
            self._drop_call()
            return
        self._fragment(self._writer.end())
        call = CallClosed(self._index, self._name, self._writer.json())
        if not self._stream:
            self._events += [CallStarted(call.index, call.name), CallArguments(call.index, call.arguments)]
        self._events.append(call)
        self.calls.append(call)
        self._index += 1

    def _drop_call(self) -> None:
        self.dropped_calls += 1
        if self._stream and self._name:
            self._events.append(CallDropped(self._index))
            self._index += 1

    def _end(self) -> None:
        """The message is closed."""
        self.ended = True
        self._stop()

    def _stop(self) -> None:
        if self._mode in ("call", "value"):
            self._drop_call()
        if self._before:
            self._mode = "response"
            self._text("".join(self._before))
        self._mode = "done"
