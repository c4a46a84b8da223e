"""Text to token ids and back: the vocabulary file, byte-pair encoding, incremental UTF-8.

Owns ids. Which text may become a control id is decided by the caller, segment by segment
(``chat`` builds the segments); text is plain unless a segment says otherwise.
Source: text specification §1.
"""

import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3mlx import markers
from k3mlx.errors import ModelFilesError, UsageError

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        _BEFORE_WORD + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _BEFORE_WORD + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

MAX_BLOCK = 400_000  # characters encoded at once
MAX_RUN = 25_000  # characters of one run of white space, or of anything else, encoded at once

_MAX_VOCABULARY_BYTES = 64 << 20
_MAX_JSON_BYTES = 16 << 20
_RUNS = re.compile(r"\s+|\S+")  # \s of a str pattern is str.isspace


class Tokenizer:
    """The byte-pair vocabulary of a checkpoint and its 256 special ids.

    Attributes
    ----------
    vocab_size: ordinary ranks plus 256; ids are 0 <= id < vocab_size.
    special: name -> id of the 256 special ids.
    stop_ids: ids that end a turn: end_of_msg, EOS, EOT and what generation_config.json names.
    warnings: lines about model files that were set aside; empty for a sound snapshot.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        names: Mapping[int, str] | None = None,
        eos_ids: Iterable[int] = (),
        warnings: Sequence[str] = (),
    ) -> None:
        """``tokens[rank]`` are the bytes of a rank; ``names`` adds names of special ids by id."""
        import tiktoken

        first = len(tokens)
        named = {first + offset: name for offset, name in markers.NAMES.items()} | dict(names or {})
        block = range(first, first + markers.BLOCK)
        special_names = [named.get(id, f"<|reserved_token_{id}|>") for id in block]

        self.vocab_size = first + markers.BLOCK
        self.special: dict[str, int] = dict(zip(special_names, block, strict=True))
        self.stop_ids = frozenset(self.special[name] for name in markers.STOPS) | frozenset(eos_ids)
        self.warnings = tuple(warnings)
        self._first_special = first
        self._special_names = special_names
        self._bytes = [*tokens, *(name.encode() for name in special_names)]
        self._bpe = tiktoken.Encoding(
            "kimi-k3",
            pat_str=PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens=self.special,
        )

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read ``tiktoken.model`` and, where present, ``tokenizer_config.json`` (names of special ids) and
        ``generation_config.json`` (ids that end a turn) from a model folder.

        Raises ModelFilesError naming the file, the line and what was expected.
        """
        folder = Path(folder)
        tokens = read_vocabulary(folder / "tiktoken.model")
        names, warnings = _special_names(folder / "tokenizer_config.json", len(tokens))
        eos_ids = _eos_ids(folder / "generation_config.json", len(tokens) + markers.BLOCK)
        return cls(tokens, names=names, eos_ids=eos_ids, warnings=warnings)

    def encode(
        self,
        text: str,
        allow_special: bool = False,
        *,
        max_block: int = MAX_BLOCK,
        max_run: int = MAX_RUN,
    ) -> list[int]:
        """Ids of a text. Special names in it are ordinary text unless ``allow_special``.

        Very long text is cut before encoding into blocks of ``max_block`` characters, and inside a block
        where a run of white space or of anything else exceeds ``max_run``; the cuts change ids (text
        specification §1.5). Raises UsageError for a lone surrogate, which has no UTF-8 form.
        """
        if allow_special and text in self.special:
            return [self.special[text]]
        check_text(text, "text")
        ids: list[int] = []
        for part in _cut(text, max_block, max_run):
            if allow_special:
                ids += self._bpe.encode(part, allowed_special="all", disallowed_special=())
            else:
                ids += self._bpe.encode_ordinary(part)
        return ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, allow_special) segments, each encoded on its own and concatenated."""
        return [id for text, allow_special in segments for id in self.encode(text, allow_special)]

    def token_bytes(self, id: int) -> bytes:
        """The bytes of an id; for a special id the UTF-8 of its name."""
        if not 0 <= id < self.vocab_size:
            raise UsageError(f"token id {id} is outside the vocabulary; expected 0 to {self.vocab_size - 1}")
        return self._bytes[id]

    def marker(self, id: int) -> str | None:
        """The name of a special id, None for any other id."""
        offset = id - self._first_special
        return self._special_names[offset] if 0 <= offset < markers.BLOCK else None

    def piece(self, id: int) -> bytes | str:
        """What the output parser eats: the name (str) of a special id, the bytes of an ordinary one."""
        return self.marker(id) or self.token_bytes(id)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids: all their bytes as UTF-8, U+FFFD for what is not; special ids give their names."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


class StreamDecoder:
    """Incremental UTF-8: bytes in, complete characters out.

    At most 3 bytes of an unfinished character wait for the rest; bytes that can never become a character
    are U+FFFD at once. One decoder serves one channel (text specification §1.8).
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        held = self._decoder.getstate()[0]
        if held[:1] == b"\xed" and held[1:2] >= b"\xa0":  # half of a surrogate, which codecs waits for
            text += self.flush()
        return text

    def flush(self) -> str:
        """What is left when the channel ends: U+FFFD for an unfinished character, else nothing."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def check_text(text: str, what: str) -> None:
    """Raise UsageError if ``text``, which the message calls ``what``, cannot be written as UTF-8."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UsageError(
            f"{what} holds the lone surrogate U+{code:04X} at character {error.start}; "
            "expected Unicode characters: remove it or put U+FFFD in its place"
        ) from None


def _cut(text: str, max_block: int, max_run: int) -> Iterator[str]:
    """The parts of a text that are encoded one by one; a short text is its own only part."""
    for start in range(0, len(text), max_block):
        block = text[start : start + max_block]
        part_start = 0
        if len(block) > max_run:
            for run in _RUNS.finditer(block):
                for cut in range(run.start() + max_run, run.end(), max_run):
                    yield block[part_start:cut]
                    part_start = cut
        yield block[part_start:]


def read_vocabulary(path: Path) -> list[bytes]:
    """Token bytes by rank from a ``tiktoken.model`` file: lines of base64, one space, decimal rank.

    Ranks must be 0, 1, 2, ... without gap or repetition, tokens distinct, all 256 single bytes among them.
    Raises ModelFilesError naming the line.
    """
    data = _read(path, _MAX_VOCABULARY_BYTES, "the model's vocabulary, without which there is no text")
    tokens = _parse_canonical(data)
    if tokens is None:
        tokens = _parse_lines(data, path)
    missing = set(range(256)) - {token[0] for token in tokens if len(token) == 1}
    if missing:
        raise ModelFilesError(
            f"{path}: {len(tokens)} tokens, but none for {len(missing)} of the 256 single bytes (first: "
            f"0x{min(missing):02X}); the file is cut short or not a byte-pair vocabulary: fetch it again"
        )
    return tokens


def _parse_canonical(data: bytes) -> list[bytes] | None:
    """Tokens of a file written in order of rank without any irregularity, None for any other file.

    Printing the tokens again and comparing is the check: a whole file at once, twice as fast as lines.
    """
    fields = data.split()
    try:
        tokens = list(map(binascii.a2b_base64, fields[::2]))
    except binascii.Error:
        return None
    lines = [b"%b %d\n" % (binascii.b2a_base64(t, newline=False), rank) for rank, t in enumerate(tokens)]
    sound = b"".join(lines) == data and b"" not in tokens and len(set(tokens)) == len(tokens)
    return tokens if sound else None


_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (0|[1-9][0-9]{0,8})")


def _parse_lines(data: bytes, path: Path) -> list[bytes]:
    """Line by line, lines in any order: slower, and names the line that is wrong."""
    by_rank: dict[int, bytes] = {}
    line_of_rank: dict[int, int] = {}
    line_of_token: dict[bytes, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        token, rank = _parse_line(line, number, path)
        if rank in by_rank:
            raise _damaged(path, number, f"rank {rank} was already given on line {line_of_rank[rank]}")
        if token in line_of_token:
            raise _damaged(path, number, f"the token of line {line_of_token[token]} is repeated")
        by_rank[rank] = token
        line_of_rank[rank] = line_of_token[token] = number
    for expected, rank in enumerate(sorted(by_rank)):
        if rank != expected:
            raise _damaged(path, line_of_rank[rank], f"rank {rank}, but there is no rank {expected}")
    return [by_rank[rank] for rank in range(len(by_rank))]


def _parse_line(line: bytes, number: int, path: Path) -> tuple[bytes, int]:
    match = _LINE.fullmatch(line)
    try:
        token = binascii.a2b_base64(match[1]) if match else b""
    except binascii.Error:
        token = b""
    if not match or binascii.b2a_base64(token, newline=False) != match[1]:
        raise _damaged(path, number, f"{_excerpt(line)} is not a base64 token, one space and a decimal rank")
    return token, int(match[2])


def _damaged(path: Path, number: int, finding: str) -> ModelFilesError:
    return ModelFilesError(
        f"{path} line {number}: {finding}; expected lines 'BASE64 RANK' with ranks 0, 1, 2, ... "
        "each once. The file is damaged: fetch it again"
    )


def _excerpt(line: bytes) -> str:
    text = line[:40].decode("utf-8", errors="backslashreplace")
    return repr(text + ("..." if len(line) > 40 else ""))


def _special_names(path: Path, first: int) -> tuple[dict[int, str], list[str]]:
    """Names of special ids from ``added_tokens_decoder``, by id, and a warning if they were set aside.

    A file that disagrees about a marker this package relies on (one of an earlier Kimi model, say) is
    set aside whole: the names of the markers are part of the prompt format, not of the snapshot.
    """
    added = _read_json(path).get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise ModelFilesError(
            f"{path}: added_tokens_decoder is {_kind(added)}; expected an object of id: token"
        )
    names: dict[int, str] = {}
    for key, entry in added.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (isinstance(content, str) and content) or not re.fullmatch(r"[0-9]{1,9}", key):
            raise ModelFilesError(
                f"{path}: added_tokens_decoder has {_excerpt(key.encode(errors='replace'))}; "
                "expected decimal ids, each with a 'content' string"
            )
        names[int(key)] = content
    conflict = _conflict(names, first)
    if conflict:
        return {}, [
            f"{path.name}: {conflict}; its names are set aside, the names of the K3 prompt format are used"
        ]
    return names, []


def _conflict(names: dict[int, str], first: int) -> str | None:
    """What in a name file contradicts the block of special ids at ``first``; None if nothing does."""
    relied_on = {first + offset: name for offset, name in markers.NAMES.items() if name in markers.RELIED_ON}
    block = range(first, first + markers.BLOCK)
    for id, name in names.items():
        if id not in block:
            return f"id {id} ({name}) is outside the special ids {block[0]} to {block[-1]}"
        if relied_on.get(id, name) != name:
            return f"id {id} is {name}, expected {relied_on[id]}"
    known = {first + offset: name for offset, name in markers.NAMES.items()} | names
    final = [known.get(id, f"<|reserved_token_{id}|>") for id in block]
    repeated = {name for name in final if final.count(name) > 1}
    return f"{min(repeated)} names two ids" if repeated else None


def _eos_ids(path: Path, vocab_size: int) -> list[int]:
    """``eos_token_id`` of generation_config.json, an id or a list of ids, as a list."""
    value = _read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < vocab_size:
            raise ModelFilesError(
                f"{path}: eos_token_id holds {id!r}; expected ids from 0 to {vocab_size - 1}"
            )
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional JSON file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path, _MAX_JSON_BYTES, "a part of the model"))
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not JSON ({error}); the file is damaged: fetch it again") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} holds {_kind(value)}; expected a JSON object")
    return value


def _read(path: Path, limit: int, role: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        reason = "not found" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise ModelFilesError(
            f"{path}: {reason}; expected {role}. Check the folder or fetch the file again"
        ) from None
    if len(data) > limit:
        raise ModelFilesError(f"{path} is larger than {limit} bytes; expected {role}")
    return data


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(
        type(value), repr(value)
    )
