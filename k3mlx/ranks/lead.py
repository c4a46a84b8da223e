"""Rank 0's side of a layer: what it keeps of the experts, and how the others' part of the sum comes back.

Owns the order of a layer's collectives as rank 0 sees it, and the report on all ranks. `Alone` is the same for a
run of one process. Source of the sum: model specification §2.6.2; partial sums are added by rising rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .exchange import Evaluate, Exchange, Floats, pack
from .owners import own
from .team import Team

Total = Callable[[Floats], Floats]  # a rank's own partial sum [T, L] to the sum of all


class Ranks(Protocol):
    """How a layer's routed experts are spread over processes, for the model on rank 0."""

    def own(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those that this process computes."""

    def spread(
        self, layer: int, latent: Any, ids: NDArray[np.intp], weights: Floats, evaluate: Evaluate
    ) -> AbstractContextManager[Total]:
        """A context in which the others compute theirs; its value is a `Total`, to be called once.

        latent [T, L] float32 (an evaluated mlx array), ids and weights [T, k]; evaluate waits, under a deadline.
        """

    def report(self) -> list[dict[str, Any]]:
        """The `ranks` of the engine's report."""

    def close(self) -> None:
        """The run is over."""


class Alone:
    """One process has all experts."""

    def own(self, layer: int, experts: Sequence[int]) -> list[int]:
        return list(experts)

    @contextmanager
    def spread(
        self, layer: int, latent: Any, ids: NDArray[np.intp], weights: Floats, evaluate: Evaluate
    ) -> Iterator[Total]:
        yield lambda mine: mine

    def report(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        """Nobody to be told."""


class Lead:
    """Rank 0 of several. `experts_report` says what its own store has done."""

    def __init__(self, team: Team, experts_report: Callable[[], dict[str, Any]] = dict) -> None:
        self.experts_report = experts_report
        self.team = team
        self._exchange: Exchange = team.exchange
        self._asking = threading.Lock()
        self._last: list[dict[str, Any]] = []

    def own(self, layer: int, experts: Sequence[int]) -> list[int]:
        return own(layer, experts, 0, self.team.size)

    @contextmanager
    def spread(
        self, layer: int, latent: Any, ids: NDArray[np.intp], weights: Floats, evaluate: Evaluate
    ) -> Iterator[Total]:
        """Latents go out before anything is computed here; the sums are waited for when ours is there.

        If this rank fails in between, the others are in the middle of the layer: they are let finish it.
        """
        exchange, over = self._exchange, False
        self.team.tell({"op": "layer", "layer": layer, "tokens": len(ids)})
        host = np.array(latent)
        given = exchange.begin(pack(host, ids, weights))

        def total(mine: Floats) -> Floats:
            nonlocal over
            over = True  # after a collective has failed, none may be called again
            exchange.end(given, evaluate)
            parts = exchange.end(exchange.begin(mine), evaluate)
            out = parts[0].copy()
            for part in parts[1:]:
                out += part
            return out

        try:
            yield total
        finally:
            if not over:
                total(np.zeros_like(host))

    def report(self) -> list[dict[str, Any]]:
        with self._asking:
            if self.team.open:
                mine = {
                    "rank": 0,
                    "experts": self.experts_report(),
                    "traffic": asdict(self._exchange.traffic),
                }
                others = [answer["report"] for answer in self.team.ask({"op": "report"})]
                self._last = [mine, *others]
            return self._last

    def close(self) -> None:
        self.report()
        self.team.close()
