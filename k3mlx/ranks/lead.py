"""Rank 0's side of a layer: what it keeps of the experts, and how the others' part of the sum comes back.

Owns the order of a layer's collectives as rank 0 sees it, and the report on all ranks. `Alone` is the same for a
run of one process, `split.SplitLead` for dense weights that are split too. Source of the sum: model specification
§2.6.2; partial sums are added by rising rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.model.state import State

from .exchange import Evaluate, Exchange, Floats, pack
from .links import Message
from .owners import own
from .part import Part
from .team import Team

Arrays = dict[str, np.ndarray]  # of a state, as `State.arrays` names them
# a rank's own sum of routed experts [T, L] and its shared experts [T, D], to those of all
Total = Callable[[Floats, mx.array], tuple[Floats, mx.array]]
Whole = Callable[
    [mx.array], mx.array
]  # a rank's own part of what it computes with split weights, to that of all


class Alone:
    """How the work of a model is spread over processes, as the model on rank 0 sees it. Here one process has all."""

    part: Part | None = None  # what this one has of the dense weights, if they are split

    def own(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of `experts` that this process computes."""
        return list(experts)

    def begin(self, state: State, tokens: int) -> None:
        """A step of so many tokens starts, from `state`."""

    def keep(self, state: State) -> State:
        """The step, or the reading of a state, has come to `state`, which others may have parts of."""
        return state

    @contextmanager
    def share(self, what: str, layer: int, x: mx.array, evaluate: Evaluate) -> Iterator[Whole]:
        """A context in which the others compute their part of `what`; its value is a `Whole`, to be called once.

        what: `attention`, `mlp` or `head`, of x [T, D]; evaluate waits, under a deadline.
        """
        yield lambda mine: mine

    @contextmanager
    def spread(
        self,
        layer: int,
        latent: mx.array,
        ids: NDArray[np.intp],
        weights: Floats,
        x: mx.array,
        evaluate: Evaluate,
    ) -> Iterator[Total]:
        """A context in which the others compute theirs of the experts; its value is a `Total`, to be called once.

        latent [T, L] float32 and x [T, D], for the shared experts, are evaluated; ids and weights [T, k].
        """
        yield lambda mine, shared: (mine, shared)

    def gather(self, state: State, arrays: Arrays) -> Arrays:
        """The arrays of a whole state, of those that this process has."""
        return arrays

    def scatter(self, arrays: Arrays, length: int) -> Arrays:
        """Of the arrays of a whole state, after `length` tokens, those that this process has."""
        return arrays

    def report(self) -> list[dict[str, Any]]:
        """The `ranks` of the engine's report."""
        return []

    def close(self) -> None:
        """The run is over."""


class Lead(Alone):
    """Rank 0 of several, with all dense weights. `experts_report` says what its own store has done, `wait` waits for
    arrays outside of a step; they are set when the model has been loaded."""

    def __init__(self, team: Team, experts_report: Callable[[], dict[str, Any]] = dict) -> None:
        self.experts_report = experts_report
        self.wait: Evaluate = mx.eval
        self.team = team
        self._exchange: Exchange = team.exchange
        self._asking = threading.Lock()
        self._last: list[dict[str, Any]] = []

    def describe(self) -> str:
        """A line on what is spread how far."""
        dense = "all dense weights on rank 0" if self.part is None else "dense weights split over them"
        return f"{self.team.size} ranks: routed experts spread over them, {dense}"

    def own(self, layer: int, experts: Sequence[int]) -> list[int]:
        return own(layer, experts, 0, self.team.size)

    @contextmanager
    def spread(
        self,
        layer: int,
        latent: mx.array,
        ids: NDArray[np.intp],
        weights: Floats,
        x: mx.array,
        evaluate: Evaluate,
    ) -> Iterator[Total]:
        """Latents go out before anything is computed here; the sums are waited for when ours is there."""
        message = {"op": "layer", "layer": layer, "tokens": len(ids)}
        width = latent.shape[-1]
        with self._round(message, pack(np.array(latent), ids, weights), width, evaluate) as answer:
            yield lambda mine, shared: (add(answer(mine)), shared)

    @contextmanager
    def _round(
        self, message: Message, out: Floats, width: int, evaluate: Evaluate
    ) -> Iterator[Callable[[Floats], Floats]]:
        """Both collectives of a piece of work: `out` [T, n] goes to the others, and the value of this context takes our
        part [T, width] and gives everybody's [R, T, width].

        If this rank fails in between, the others are in the middle of it: they are let finish.
        """
        exchange, over = self._exchange, False
        self.team.tell(message)
        given = exchange.begin(out)

        def answer(mine: Floats) -> Floats:
            nonlocal over
            over = True  # after a collective has failed, none may be called again
            exchange.end(given, evaluate)
            return exchange.end(exchange.begin(mine), evaluate)

        try:
            yield answer
        finally:
            if not over:
                answer(np.zeros((len(out), width), np.float32))

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


def add(parts: Floats) -> Floats:
    """The sum over the first axis, in the order of ranks."""
    out = parts[0].copy()
    for part in parts[1:]:
        out += part
    return out
