"""From logits to the next id: temperature, top-k, top-p, min-p, seed. Owns no model and no text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .errors import UsageError


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is drawn. Filters apply to the distribution after temperature, in this order.

    temp: 0 is greedy. top_k: at most this many tokens, 0 for all. top_p: the smallest set of most
    probable tokens that reaches this mass (0 keeps one, 1 all). min_p: tokens of at least this
    fraction of the most probable one's probability. seed: None draws from the system's entropy.
    Raises UsageError for a value out of range.
    """

    temp: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temp) and self.temp >= 0):
            raise UsageError(f"temp is {self.temp}, expected a finite number of at least 0")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if not 0 <= value <= 1:
                raise UsageError(f"{name} is {value}, expected a number from 0 to 1")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}, expected 0 (all) or more")
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"seed is {self.seed}, expected 0 or more")


class Sampler:
    """Draws ids; two samplers with the same options and a seed draw the same ids from the same logits."""

    def __init__(self, options: SamplingOptions) -> None:
        self.options = options
        self._rng = np.random.default_rng(options.seed)

    def __call__(self, logits: np.ndarray) -> int:
        """The next id for finite logits [V]. Equal logits rank by rising id."""
        options = self.options
        if options.temp == 0:
            return int(np.argmax(logits))  # the first of equals
        scaled = logits.astype(np.float64)
        scaled = (scaled - scaled.max()) / options.temp
        order = np.argsort(-scaled, kind="stable")
        if options.top_k:
            order = order[: options.top_k]
        probs = np.exp(scaled[order])
        probs /= probs.sum()
        mass_before = np.cumsum(probs) - probs
        keep = (mass_before < options.top_p) & (probs >= options.min_p * probs[0])
        keep[0] = True
        order, probs = order[keep], probs[keep]
        draw = self._rng.random() * probs.sum()
        return int(order[np.searchsorted(np.cumsum(probs)[:-1], draw, side="right")])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities of logits [..., V], in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
