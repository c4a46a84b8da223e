"""Rows of token ids with a loss weight for each target: conversations, drills and prose, mixed and packed.

Owns encoding, weighting and the worker processes that keep a trainer fed. Batch number n is a function of
(seed, n) alone, whatever the number of workers.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3mlx import markers
from k3mlx.chat import Segment, render
from k3mlx.tokenizer import Tokenizer

from .tasks import KINDS, Conversation, Source, conversation, drill, evaluation_prompt, prose_material

ANSWER_TOKENS = 40  # an answer counts at most as this many tokens
SENTENCE_END = re.compile(r"\n|[.!?][\"']? ")
PROMPT_WEIGHT = 0.05
PROSE_WEIGHT = 0.8


class Mixture(NamedTuple):
    """Shares of the rows; the rest are conversations."""

    prose: float = 0.24
    drills: float = 0.07


class Batch(NamedTuple):
    """ids [B, T+1] uint16; weights [B, T] of the targets ids[:, 1:]."""

    ids: NDArray[np.uint16]
    weights: NDArray[np.float32]


class Encoder:
    """Text of the corpus to ids and weights."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(folder)
        self._short = functools.lru_cache(50_000)(lambda text: tuple(self.tokenizer.encode(text)))

    def segment(self, segment: Segment) -> tuple[int, ...] | list[int]:
        text, allow_special = segment
        if allow_special:
            return self.tokenizer.encode(text, True)
        return self._short(text) if len(text) < 24 else self.tokenizer.encode(text)

    def conversation(self, talk: Conversation) -> tuple[list[int], list[float]]:
        """Ids and weights; what the assistant writes after its generation prompt counts as an answer."""
        segments = render(
            talk.messages,
            tools=talk.tools,
            thinking=talk.thinking,
            effort=talk.effort,
            add_generation_prompt=False,
        )
        ids: list[int] = []
        weights: list[float] = []
        seen: tuple[str, str] = ("", "")
        separators, start = -1, 0
        for segment in segments:
            ids += self.segment(segment)
            weights += [PROMPT_WEIGHT] * (len(ids) - len(weights))
            text, allow_special = segment
            if not allow_special and text == "assistant" and seen == (" role", '="'):
                separators = 0
            elif allow_special and separators >= 0:
                separators += text == markers.SEP
                if separators == 2 and text == markers.SEP:
                    start = len(ids)
                elif text == markers.END_OF_MSG:
                    count = len(ids) - start
                    weights[start:] = [min(1.0, ANSWER_TOKENS / count)] * count
                    separators = -1
            seen = (seen[1], text)
        return ids, weights

    def example(self, talk: Conversation) -> tuple[list[int], int]:
        """Ids of a conversation, and where its last answer starts."""
        ids, weights = self.conversation(talk)
        start = len(ids)
        while weights[start - 1] > PROMPT_WEIGHT:
            start -= 1
        return ids, start

    def drill(self, source: Source) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        for text, is_answer in drill(source, source.rng.choice([300, 600, 1200])):
            piece = self.tokenizer.encode(text)
            ids += piece
            weights += [1.0 if is_answer else PROMPT_WEIGHT] * len(piece)
        return ids, weights

    def prose(self, text: str) -> NDArray[np.uint16]:
        """All passages as one run of ids, a line break between passages."""
        return np.array(
            [id for part in text.split("\f") for id in self.tokenizer.encode(part + "\n")], np.uint16
        )


class Rows:
    """Draws training rows."""

    def __init__(self, folder: Path, prose: str, mixture: Mixture) -> None:
        self.encoder = Encoder(folder)
        self.words, self.sentences = prose_material(prose)
        self.prose = self.encoder.prose(prose)
        self.text = prose.replace("\f", "\n")
        self.starts = [match.end() for match in SENTENCE_END.finditer(self.text)]
        self.mixture = mixture

    def batch(self, seed: int, number: int, rows: int, length: int) -> Batch:
        rng = random.Random(f"{seed} {number}")
        source = Source(rng, self.words, self.sentences)
        drawn = [self._row(source, length + 1) for _ in range(rows)]
        ids = np.array([ids for ids, _ in drawn], np.uint16)
        weights = np.array([weights[1:] for _, weights in drawn], np.float32)
        return Batch(ids, weights)

    def _row(self, source: Source, size: int) -> tuple[list[int], list[float]]:
        rng = source.rng
        pick = rng.random()
        if pick < self.mixture.prose:
            return self._prose(rng, size), [PROSE_WEIGHT] * size
        ids: list[int] = []
        weights: list[float] = []
        drills = pick < self.mixture.prose + self.mixture.drills
        budget = rng.choice([200, 400, size * 5 // 2, size * 5 // 2])
        while len(ids) < size:
            piece = (
                self.encoder.drill(source)
                if drills
                else self.encoder.conversation(conversation(source, budget))
            )
            ids += piece[0]
            weights += piece[1]
        return ids[:size], weights[:size]

    def _prose(self, rng: random.Random, size: int) -> list[int]:
        """A row of prose: half of them from the start of a sentence, as a prompt would be, half from anywhere."""
        if rng.random() < 0.5:
            start = rng.choice(self.starts)
            ids = self.encoder.tokenizer.encode(self.text[start : start + 6 * size])[:size]
            if len(ids) == size:
                return ids
        start = rng.randrange(len(self.prose) - size)
        return self.prose[start : start + size].tolist()


def _work(
    rows: Rows, seed: int, first: int, stride: int, shapes: list[tuple[int, int, int]], queue: Any
) -> None:
    number = first
    while True:
        count, length = next((count, length) for until, count, length in shapes if number < until)
        queue.put(rows.batch(seed, number, count, length))
        number += stride


def stream(rows: Rows, seed: int, shapes: list[tuple[int, int, int]], workers: int) -> Iterator[Batch]:
    """Batches without end, made by `workers` processes. `shapes`: (until batch number, rows, length), in order."""
    context = multiprocessing.get_context("fork")
    queues = [context.Queue(maxsize=12) for _ in range(workers)]
    for first, queue in enumerate(queues):
        arguments = (rows, seed, first, workers, shapes, queue)
        context.Process(target=_work, args=arguments, daemon=True).start()
    while True:
        for queue in queues:
            yield queue.get()


def evaluation_talks(
    material: tuple[list[str], list[str]], count: int, seed: int
) -> dict[str, list[Conversation]]:
    """For each label (kind and thinking), `count` held-out conversations; the last message is the expected one."""
    talks: dict[str, list[Conversation]] = {}
    for kind in KINDS:
        for thinking in (False, True):
            source = Source(random.Random(f"{seed} {kind} {thinking}"), *material)
            label = f"{kind}, thinking {'on' if thinking else 'off'}"
            talks[label] = [evaluation_prompt(kind, source, thinking) for _ in range(count)]
    return talks


def evaluation_set(
    encoder: Encoder, material: tuple[list[str], list[str]], count: int, seed: int
) -> dict[str, list[tuple[list[int], int]]]:
    """The same as (ids, start): ids[start:] is what greedy decoding must produce."""
    return {
        label: [encoder.example(talk) for talk in talks]
        for label, talks in evaluation_talks(material, count, seed).items()
    }
