"""What the tests of the text interface share: the vectors, a vocabulary of their own, the released one.

Owns no expectations. The released vocabulary is read from the test data; everything else runs without it.
"""

import binascii
import json
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from k3mlx.channels import Event, OutputParser
from k3mlx.chat import Segment
from k3mlx.tokenizer import Tokenizer
from tests.paths import DATA

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "text_vectors.json").read_text("utf-8"))
WEATHER: dict[str, Any] = VECTORS["weather"]

# the order of single bytes in every vocabulary of this format: printable Latin-1 first
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [bytes([b]) for b in (*_PRINTABLE, *sorted(set(range(256)) - set(_PRINTABLE)))]


SIGNS = {"(": "<|open|>", ")": "<|close|>", "·": "<|sep|>", "¶": "<|end_of_msg|>"}


def marked(text: str) -> str:
    """A text with marker names in place of their signs, which make outputs short enough to be read."""
    return "".join(SIGNS.get(character, character) for character in text)


@cache
def released() -> Tokenizer:
    return Tokenizer.load(DATA)


@cache
def bytewise() -> Tokenizer:
    """A vocabulary of single bytes: every character of more than one byte spans several tokens."""
    return Tokenizer(BYTES)


def with_tokens(texts: Iterable[str]) -> Tokenizer:
    """A vocabulary in which each of the texts is a token of its own, should it be a piece."""
    longer = dict.fromkeys(text.encode() for text in texts)
    return Tokenizer([*BYTES, *(token for token in longer if len(token) > 1)])


def vocabulary_file(tokens: Sequence[bytes]) -> bytes:
    lines = (binascii.b2a_base64(token, newline=False) + b" %d\n" % rank for rank, token in enumerate(tokens))
    return b"".join(lines)


def joined(segments: Iterable[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def pieces(marked: str, tokenizer: Tokenizer | None = None) -> list[bytes | str]:
    """Parser input for a text in which every marker name stands for its control id."""
    tokenizer = tokenizer or bytewise()
    return [tokenizer.piece(id) for id in tokenizer.encode(marked, allow_special=True)]


def plain(text: str) -> list[bytes | str]:
    """Parser input for a text in which marker names are text."""
    return [bytewise().piece(id) for id in bytewise().encode(text)]


def rechunked(stream: Sequence[bytes | str], random: random.Random) -> list[bytes | str]:
    """The same stream with its bytes cut at random places; names of special ids stay whole."""
    out: list[bytes | str] = []
    run = b""
    for piece in (*stream, ""):
        if isinstance(piece, bytes):
            run += piece
            continue
        while run:
            size = random.randint(1, len(run))
            out.append(run[:size])
            run = run[size:]
        if piece:
            out.append(piece)
    return out


def parsed(
    start: str, stream: Iterable[bytes | str], stream_arguments: bool = False
) -> tuple[OutputParser, list[Event]]:
    parser = OutputParser(start, stream_arguments=stream_arguments)
    events = [event for piece in stream for event in parser.feed(piece)]
    return parser, events + parser.finish()


def summary(parser: OutputParser) -> dict[str, Any]:
    """What was parsed, in the form of the vectors with nothing left out."""
    return {
        "reasoning": parser.reasoning,
        "content": parser.content,
        "calls": [{"name": call.name, "arguments": call.arguments} for call in parser.calls],
        "ended": parser.ended,
        "dropped_calls": parser.dropped_calls,
    }


def expected(**given: Any) -> dict[str, Any]:
    return {"reasoning": "", "content": "", "calls": [], "ended": True, "dropped_calls": 0} | given
