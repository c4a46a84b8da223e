"""Whether, and how far, to read experts of the next layer before its router has spoken.

The next layer's router applied to this layer's input ranks likely experts. This measures how often each
rank comes true and has only the ranks read ahead that pay. Reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAYS = 0.5  # share of right guesses from which a rank is read ahead: a wrong one delays a right one
MEMORY = 1 / 64  # weight of the newest guess in the running share of its rank
TRIAL = 32  # guesses at a rank before its share is believed
SAMPLE = 16  # while nothing pays, every so many tokens are guessed at, to see whether it has come to pay


class Lookahead:
    """The guesses of a run. `setting` is auto, off, or how many experts to read ahead whatever they bring.

    `ranks` experts are guessed for a layer, the most likely first. One thread.
    """

    def __init__(self, setting: str, ranks: int) -> None:
        self.setting = setting
        self._fixed = int(setting) if setting.isdecimal() else None
        self.ranks = max(ranks, self._fixed or 0)
        self._share = np.full(self.ranks, PAYS)  # of guesses at each rank that came true, running
        self._seen = 0
        self._right = 0
        self._guessed = 0
        self._layer = -1  # the layer that the pending guess is for
        self._guess: list[int] = []
        self._idle = 0
        self._first_layer = -1

    def wanted(self, layer: int, tokens: int) -> bool:
        """Whether a guess about the layer after `layer` is worth its arithmetic now."""
        if self.setting == "off" or tokens != 1:
            return False
        if self.depth() > 0 or self._seen < TRIAL:
            return True
        if self._first_layer < 0 or layer <= self._first_layer:
            self._first_layer = layer
            self._idle += 1
        return self._idle % SAMPLE == 0

    def depth(self) -> int:
        """How many ranks to read ahead now."""
        if self.setting == "off":
            return 0
        if self._fixed is not None:
            return self._fixed
        if self._seen < TRIAL:
            return 0
        paying = np.cumsum(self._share >= PAYS)
        return int(paying[-1]) if paying.size else 0

    def guess(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Note the experts that are likely for a layer, by rank; returns those to read ahead."""
        self._layer, self._guess = layer, [int(expert) for expert in experts][: self.ranks]
        if self._fixed is not None:
            return self._guess[: self._fixed]
        if self._seen < TRIAL:
            return []
        return [e for e, share in zip(self._guess, self._share, strict=False) if share >= PAYS]

    def learn(self, layer: int, ids: NDArray[np.intp]) -> None:
        """Compare the guess about a layer with what its router chose, ids [T, k]."""
        if layer != self._layer:
            return
        chosen = set(ids.reshape(-1).tolist())
        came_true = np.array([expert in chosen for expert in self._guess])
        share = self._share[: len(came_true)]
        share += MEMORY * (came_true - share)
        self._right += len(chosen.intersection(self._guess[: len(chosen)]))
        self._guessed += len(chosen)
        self._seen += 1
        self._layer = -1

    def report(self) -> dict[str, Any]:
        """The setting, the share of chosen experts that were among as many guesses, and the present depth."""
        return {
            "lookahead": self.setting,
            "lookahead_recall": self._right / self._guessed if self._guessed else 0.0,
            "lookahead_depth": self.depth(),
        }
