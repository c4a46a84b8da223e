"""The model files that text needs: the vocabulary, the names of special ids, the ids that end a turn.

Owns the reading and checking of ``tiktoken.model``, ``tokenizer_config.json`` and ``generation_config.json``.
Encoding is ``tokenizer``'s part. Source: text specification §1.1, §1.2, §3.
"""

import binascii
import json
import re
from pathlib import Path
from typing import Any

from k3mlx import markers
from k3mlx.errors import ModelFilesError

_MAX_VOCABULARY_BYTES = 64 << 20
_MAX_JSON_BYTES = 16 << 20


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
    return tokens if b"".join(lines) == data and len(set(tokens)) == len(tokens) else None


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


def read_special_names(path: Path, first: int) -> tuple[dict[int, str], list[str]]:
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
        is_name = isinstance(content, str) and content and content.isprintable()
        if not is_name or not re.fullmatch(r"[0-9]{1,9}", key):
            raise ModelFilesError(
                f"{path}: added_tokens_decoder has {_excerpt(key.encode(errors='replace'))}; "
                "expected decimal ids, each with a printable 'content'"
            )
        names[int(key)] = str(content)
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


def read_eos_ids(path: Path, vocab_size: int) -> list[int]:
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
