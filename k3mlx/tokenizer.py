"""Text to token ids and back: byte-pair encoding, decoding, incremental UTF-8.

Owns ids. Which text may become a control id is decided by the caller, segment by segment (``chat`` builds
the segments); text is plain unless a segment says otherwise. The files are read by ``vocabulary``.
Source: text specification §1.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from k3mlx import markers
from k3mlx.errors import ModelFilesError, UsageError
from k3mlx.vocabulary import read_eos_ids, read_special_names, read_vocabulary

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
    def load(cls, folder: str | Path, vocab_size: int | None = None) -> "Tokenizer":
        """Read ``tiktoken.model`` and, where present, ``tokenizer_config.json`` (names of special ids) and
        ``generation_config.json`` (ids that end a turn) from a model folder.

        ``vocab_size`` is the model's, special ids included; a vocabulary of another size is refused.
        Raises ModelFilesError naming the file, the line and what was expected.
        """
        path = Path(folder) / "tiktoken.model"
        tokens = read_vocabulary(path)
        size = len(tokens) + markers.BLOCK
        if vocab_size not in (None, size):
            raise ModelFilesError(
                f"{path}: {len(tokens)} ranks and {markers.BLOCK} special ids make {size}, the model has "
                f"{vocab_size}; the file is cut short or belongs to another model: fetch it again"
            )
        names, warnings = read_special_names(path.with_name("tokenizer_config.json"), len(tokens))
        eos_ids = read_eos_ids(path.with_name("generation_config.json"), size)
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
        for part in cut_long_text(text, max_block, max_run):
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
        return self._decoder.decode(b"", final=True)


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


def cut_long_text(text: str, max_block: int, max_run: int) -> Iterator[str]:
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
