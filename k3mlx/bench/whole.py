"""Prompt and decode of the whole model at chosen lengths, repeated.

Owns which ids are fed, the repeats and what is noted of each. What the notes mean is `figures.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from k3mlx.engine import Engine, Session
from k3mlx.errors import UsageError
from k3mlx.generation import report_since

Ids = Callable[[int], Sequence[int]]  # the ids of a repeat, by its number


@dataclass(frozen=True)
class Trial:
    """One repeat: seconds, what each decode step took and found in memory, and the reports of both phases."""

    prompt_seconds: float
    step_seconds: tuple[float, ...]
    step_hits: tuple[int, ...]
    step_misses: tuple[int, ...]
    prompt: dict[str, Any]
    decode: dict[str, Any]

    @property
    def decode_seconds(self) -> float:
        return sum(self.step_seconds)


def random_ids(vocab: int, count: int) -> Ids:
    """Ids of even chance, others in each repeat, the same in each run. Experts that are in memory are met less often
    than in a text."""
    return lambda number: np.random.default_rng(number).integers(0, vocab, count).tolist()


def text_ids(ids: Sequence[int], count: int, repeats: int) -> Ids:
    """Consecutive pieces of a text. Raises UsageError for a text that is too short."""
    if len(ids) < count * repeats:
        raise UsageError(
            f"the text is {len(ids)} ids long; expected {count * repeats}: {count} for each of {repeats} passes"
        )
    return lambda number: ids[number * count : (number + 1) * count]


def run_trials(
    engine: Engine, ids: Ids, prompt_tokens: int, trials: int, tell: Callable[[Trial], None] = lambda t: None
) -> list[Trial]:
    """A pass to warm up, then `trials`, each in a new session: `prompt_tokens` ids at once, the others one by one."""
    run_trial(engine, ids(0), prompt_tokens)
    done = []
    for number in range(1, trials + 1):
        done.append(run_trial(engine, ids(number), prompt_tokens))
        tell(done[-1])
    return done


def run_trial(engine: Engine, ids: Sequence[int], prompt_tokens: int) -> Trial:
    """One pass over `ids`, the first `prompt_tokens` of them as a prompt."""
    session = engine.session()
    before = engine.report()
    started = perf_counter()
    session.feed(ids[:prompt_tokens])
    prompt_seconds = perf_counter() - started
    between = engine.report()
    steps = [_step(engine, session, id) for id in ids[prompt_tokens:]]
    after = engine.report()
    seconds, hits, misses = zip(*steps, strict=True) if steps else ((), (), ())
    return Trial(
        prompt_seconds, seconds, hits, misses, report_since(before, between), report_since(between, after)
    )


def _step(engine: Engine, session: Session, id: int) -> tuple[float, int, int]:
    """Seconds, hits and misses of one decode step."""
    counters = engine.backend.store.counters
    hits, misses = counters.hits, counters.misses
    started = perf_counter()
    session.feed([id])
    seconds = perf_counter() - started
    return seconds, counters.hits - hits, counters.misses - misses
