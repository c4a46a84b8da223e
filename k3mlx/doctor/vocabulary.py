"""The text side of a model: its vocabulary loads, belongs to the configuration, and loses nothing.

Owns the findings. Reading the vocabulary is `k3mlx.tokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from k3mlx.config import ModelConfig
from k3mlx.errors import ModelFilesError
from k3mlx.markers import BOS, END_OF_MSG
from k3mlx.tokenizer import Tokenizer

from .findings import Finding, fatal, ok

SAMPLE = (
    "Grüße, 世界! 3.14159 \U0001f980\n\t if x:  <|open|>\u200b"  # many scripts, white space, a marker as text
)
PAD = "[PAD]"


def load_vocabulary(folder: Path, vocab_size: int | None) -> Tokenizer | ModelFilesError:
    """The vocabulary of a folder, or what is wrong with it."""
    try:
        return Tokenizer.load(folder, vocab_size=vocab_size)
    except ModelFilesError as error:
        return error


def check_vocabulary(
    found: Tokenizer | ModelFilesError, config: ModelConfig | None, complete: str
) -> Iterator[Finding]:
    """config: None if it cannot be read, which has its own finding. complete: the command that fetches files."""
    if isinstance(found, ModelFilesError):
        yield fatal("vocabulary", str(found), complete)
        return
    for line in found.warnings:
        yield ok("vocabulary", line)
    wrong = _disagreements(found, config) if config else []
    if wrong:
        yield fatal("vocabulary-ids", f"vocabulary and config.json disagree: {'; '.join(wrong)}", complete)
    lost = _lost(found)
    if lost:
        yield fatal("vocabulary-text", lost, complete)
    if not wrong and not lost:
        agree = "; the special ones agree with config.json" if config else ""
        yield ok("vocabulary", f"{found.vocab_size:,} ids{agree}; text comes back as it went in")


def _disagreements(tokenizer: Tokenizer, config: ModelConfig) -> list[str]:
    """Special ids that config.json gives other names than the vocabulary does."""
    pairs = {
        "bos_token_id": (config.bos_token_id, BOS),
        "eos_token_id": (config.eos_token_id, END_OF_MSG),
        "pad_token_id": (config.pad_token_id, PAD),
    }
    return [
        f"{field} is {id}, but {name} is {tokenizer.special.get(name)}"
        for field, (id, name) in pairs.items()
        if tokenizer.special.get(name) != id
    ]


def _lost(tokenizer: Tokenizer) -> str:
    """What a text loses on its way to ids and back, empty if nothing."""
    ids = tokenizer.encode(SAMPLE)
    back = tokenizer.decode(ids)
    if back != SAMPLE:
        return f"{SAMPLE!r} comes back as {back!r}"
    forged = [id for id in ids if tokenizer.marker(id) is not None]
    return f"plain text gives the special ids {forged}" if forged else ""
