"""The vocabulary of k3-nano: byte-pair ranks in the `tiktoken.model` format and the names of the special ids.

Trained with the `tokenizers` package on prose without digits and on rendered conversations, with K3's own
splitting expression. Text is broken after a quotation mark while training, so that a quoted word has the same
tokens as the bare word at the start of a text.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from k3mlx import markers
from k3mlx.chat import render
from k3mlx.tokenizer import PATTERN

from .tasks import Source, conversation, prose_material

RANKS = 2000
PROSE_CHARACTERS = 6_000_000
CONVERSATIONS = 6000
BREAKS = re.compile(
    r'\d+|(?<=")(?=[^\W\d_])'
)  # digits stay single, and no token joins a quotation mark to a letter


def texts(prose: str, seed: int) -> Iterator[str]:
    """Three parts prose, one part rendered conversations; no digits, since each digit stays a token."""
    step = max(1, len(prose) // PROSE_CHARACTERS)
    for passage in prose.split("\f")[::step]:
        yield from BREAKS.split(passage)
    source = Source(random.Random(seed), *prose_material(prose))
    for _ in range(CONVERSATIONS):
        talk = conversation(source, 800)
        segments = render(talk.messages, tools=talk.tools, thinking=talk.thinking, effort=talk.effort)
        for segment in segments:
            if not segment.allow_special:
                yield from BREAKS.split(segment.text)


def byte_of() -> dict[str, int]:
    """The printable stand-ins of a byte-level alphabet back to bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def train(prose: str, ranks: int, seed: int) -> list[bytes]:
    """The bytes of each rank; ranks 0 to 255 are the single bytes in K3's order."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=ranks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts(prose, seed), trainer)
    table = byte_of()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(table[character] for character in token) for token, _ in vocabulary]


def write(tokens: list[bytes], folder: Path) -> None:
    """Write `tiktoken.model` and `tokenizer_config.json` into the model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("".join(lines), encoding="ascii", newline="\n")
    names = {
        str(len(tokens) + offset): {"content": name, "special": True}
        for offset, name in markers.NAMES.items()
    }
    config = {
        "added_tokens_decoder": names,
        "bos_token": markers.BOS,
        "eos_token": markers.EOS,
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 10**30,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prose", type=Path, required=True, help="prose.txt of corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="model folder")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokens = train(args.prose.read_text(encoding="utf-8"), args.ranks, args.seed)
    write(tokens, args.out)
    print(f"{len(tokens)} ranks, longest {max(map(len, tokens))} bytes")


if __name__ == "__main__":
    main()
