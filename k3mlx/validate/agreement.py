"""What the differences between two paths come to at the end: KL divergence, top-1 agreement, greedy divergences.

Each path has read the same tokens with its own arithmetic throughout. Owns the verdict on a divergence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3mlx.sampling import log_softmax

NOISE = 6.0  # standard deviations of a row's logit differences that rounding is given
TIE = 0.5  # nats; tokens further apart than that are no tie, whatever the noise


@dataclass(frozen=True)
class Divergence:
    """A position after which the two paths would go on with different tokens.

    margin: the expected logit of its own choice less that of the other path's, nats. noise: the standard deviation of
    the differences of all logits of this row. near_tie: the margin is small, and noise explains it.
    """

    position: int
    expected_id: int
    got_id: int
    margin: float
    noise: float

    @property
    def near_tie(self) -> bool:
        # the difference of two logits is as noisy as sqrt(2) of one
        return bool(self.margin <= min(TIE, NOISE * np.sqrt(2) * self.noise))


@dataclass(frozen=True)
class Agreement:
    """Over all tokens of the prompt: KL(expected || got) in nats, share of equal top-1 ids, divergences."""

    tokens: int
    kl_mean: float
    kl_max: float
    kl_max_position: int
    top1: float
    logit_error: float
    divergences: tuple[Divergence, ...]

    @property
    def ok(self) -> bool:
        return all(one.near_tie for one in self.divergences) and bool(np.isfinite(self.kl_mean))


def agreement(expected: NDArray, got: NDArray) -> Agreement:
    """Compare logits [T, V] after each token of a prompt."""
    expected, got = expected.astype(np.float64), got.astype(np.float64)
    kl = kl_divergence(expected, got)
    best, theirs = expected.argmax(-1), got.argmax(-1)
    found = tuple(_divergence(t, expected[t], got[t]) for t in np.nonzero(best != theirs)[0].tolist())
    worst = int(np.nan_to_num(kl, nan=np.inf).argmax())
    return Agreement(
        tokens=len(expected),
        kl_mean=float(kl.mean()),
        kl_max=float(kl[worst]),
        kl_max_position=worst,
        top1=float((best == theirs).mean()),
        logit_error=float(np.abs(got - expected).max()),
        divergences=found,
    )


def kl_divergence(expected: NDArray, got: NDArray) -> NDArray:
    """KL(softmax(expected) || softmax(got)) of each row, nats."""
    p, q = log_softmax(expected), log_softmax(got)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def _divergence(position: int, expected: NDArray, got: NDArray) -> Divergence:
    best, theirs = int(expected.argmax()), int(got.argmax())
    return Divergence(
        position, best, theirs, float(expected[best] - expected[theirs]), float((got - expected).std())
    )
