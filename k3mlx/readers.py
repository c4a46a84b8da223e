"""Generated ids to text as a caller sees it: channels, stop strings, which ids are visible.

Owns the two readers of `generation.py`, plain continuation and chat answer. What a marker means is decided
in `channels.py`, which id comes next in `sampling.py`.
Source: text specification §1.8, §3, §4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .channels import CallClosed, Event, OutputParser, Text
from .tokenizer import StreamDecoder, Tokenizer


class Shown(NamedTuple):
    """What became visible: complete characters of a channel, or an event of a tool call."""

    channel: str
    text: str
    event: Event | None = None


class StopStrings:
    """Looks for strings in text that comes in parts, and lets through what cannot belong to one of them.

    The string that is complete first counts, of two that end together the longer one; the parts do not matter.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.found = False
        self._strings = tuple(strings)
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is safe to show. Once a string is found, what precedes it, and nothing afterwards."""
        if self.found or not self._strings:
            return "" if self.found else text
        text = self._held + text
        found = [(text.find(string), len(string)) for string in self._strings if string in text]
        if found:
            self.found, self._held = True, ""
            start, _ = min(found, key=lambda match: (sum(match), match[0]))
            return text[:start]
        held = max(self._overlap(text, string) for string in self._strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when no more text can follow it."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, string: str) -> int:
        """Length of the longest end of `text` that begins `string` without being all of it."""
        longest = min(len(text), len(string) - 1)
        return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)


class RawReader:
    """Ids of a plain continuation to text."""

    channel = "text"
    thinking = False

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder()
        self._stop = StopStrings(stop)
        self.text, self.reasoning = "", ""
        self.tool_calls: list[dict[str, str]] = []

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._stop.found

    def visible(self, id: int) -> bool:
        """Whether the id, fed next, adds to the text of the answer."""
        return id not in self._tokenizer.stop_ids

    def feed(self, id: int) -> list[Shown]:
        if id in self._tokenizer.stop_ids:
            return self.finish()
        return self._add(self._stop.feed(self._decoder.feed(self._tokenizer.token_bytes(id))))

    def finish(self) -> list[Shown]:
        return self._add(self._stop.feed(self._decoder.flush()) + self._stop.flush())

    def _add(self, text: str) -> list[Shown]:
        self.text += text
        return [Shown(self.channel, text)] if text else []


class ChatReader:
    """Ids of an answer to its channels. Stop strings count in the response only."""

    def __init__(
        self, tokenizer: Tokenizer, mode: str, stop: Sequence[str] = (), stream_arguments: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = OutputParser(mode, stream_arguments=stream_arguments)
        self._stop = StopStrings(stop)
        self._stream_arguments = stream_arguments
        self.channel = mode
        self.text, self.reasoning = "", ""
        self.tool_calls: list[dict[str, str]] = []

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._stop.found

    @property
    def thinking(self) -> bool:
        """The next id belongs to the reasoning, markers included."""
        return self._parser.mode == "think"

    def visible(self, id: int) -> bool:
        """Whether the id, fed next, adds to the text of the response."""
        parser = self._parser
        return parser.mode == "response" and not parser.in_tag and self._tokenizer.marker(id) is None

    def feed(self, id: int) -> list[Shown]:
        if id in self._tokenizer.stop_ids and self._tokenizer.marker(id) is None:
            return self.finish()  # a model may name an ordinary id as its end; the parser knows markers only
        shown = self._read(self._parser.feed(self._tokenizer.piece(id)))
        return shown if self._parser.mode == "response" else shown + self._flush()

    def finish(self) -> list[Shown]:
        return self._read(self._parser.finish()) + self._flush()

    def _read(self, events: list[Event]) -> list[Shown]:
        shown: list[Shown] = []
        for event in events:
            if not isinstance(event, Text):
                shown += self._flush() + self._call(event)
            elif event.channel == "think":
                self.channel = "think"
                self.reasoning += event.text
                shown += [*self._flush(), Shown("think", event.text)]
            else:
                shown += self._respond(self._stop.feed(event.text))
        return shown

    def _call(self, event: Event) -> list[Shown]:
        if self.stopped:
            return []
        self.channel = "tools"
        if isinstance(event, CallClosed):
            self.tool_calls.append({"name": event.name, "arguments": event.arguments})
            return [Shown("tools", f"{event.name}({event.arguments})\n", event)]
        return [Shown("tools", "", event)] if self._stream_arguments else []

    def _flush(self) -> list[Shown]:
        return self._respond(self._stop.flush())

    def _respond(self, text: str) -> list[Shown]:
        if not text:
            return []
        self.channel = "response"
        self.text += text
        return [Shown("response", text)]
