"""A rank's part of the dense weights at work: it answers the inputs of layers with what its heads and widths add.

Owns the states of this rank, by the numbers that rank 0 gives them, and the other end of every collective of
`split.py`. Knows no routers and no residual stream: each input comes from rank 0. Used by the thread that owns MLX.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from k3mlx.model.mla import Span
from k3mlx.model.model import MlxModel, update_arrays
from k3mlx.model.state import KdaState, State, Update, array_shapes
from k3mlx.stages import no_probe

from .exchange import Evaluate, Exchange, Floats
from .links import Message
from .part import Part, divide
from .split import by_head, given, lengthened, split_names, taken, widened


class DensePart:
    """`model` has the weights of `part`. tried: calls a piece of work, again on another path when it fails; wait: waits
    for a collective, evaluate for own work."""

    def __init__(
        self,
        model: MlxModel,
        part: Part,
        exchange: Exchange,
        tried: Callable[[Callable[[], Floats]], Floats],
        wait: Evaluate,
        evaluate: Evaluate,
    ) -> None:
        self._model = model
        self._part = part
        self._exchange = exchange
        self._tried = tried
        self._wait = wait
        self._evaluate = evaluate
        self._states = {0: State.empty(part.config, model.dtype)}
        self._base = self._states[0]
        self._span: Span | None = None
        self._updates: dict[int, Update] = {}
        self._made: Callable[[], State] = lambda: self._base

    @property
    def states(self) -> int:
        """How many states are kept, the empty one and those of sessions."""
        return len(self._states)

    def serve(self, asked: Message) -> None:
        """Do what rank 0 has asked for."""
        {
            "step": self._step,
            "attention": self._attention,
            "mlp": self._mlp,
            "head": self._head,
            "keep": self._keep,
            "gather": self._gather,
            "scatter": self._scatter,
        }[asked["op"]](asked)

    def shared(self, layer: int, x: Floats) -> Floats:
        """This rank's part of the shared experts [T, D] on x [T, D]; nothing is done again if it fails."""
        if not self._part.inner(layer):
            return np.zeros_like(x)
        return self._run(x, lambda given: self._model.shared_experts(given, layer, no_probe))

    def _step(self, asked: Message) -> None:
        """A step from a state starts; what the one before has computed is forgotten unless it was kept."""
        for number in asked["gone"]:
            del self._states[number]
        base, updates = self._states[asked["number"]], dict[int, Update]()
        self._base, self._span, self._updates = base, Span.of(base.layers, asked["tokens"]), updates

        def made() -> State:
            return base.commit([updates[layer] for layer in range(len(base.layers))], asked["tokens"])

        self._made = made

    def _keep(self, asked: Message) -> None:
        self._states[asked["number"]] = self._made()

    def _attention(self, asked: Message) -> None:
        layer, x = asked["layer"], self._input(asked)
        old = self._base.layers[layer]
        if not self._part.heads[self._model.config.layer_kinds[layer]]:
            self._updates[layer] = (
                old if isinstance(old, KdaState) else mx.zeros((len(x), old.width), self._model.dtype)
            )
            self._answer(np.zeros_like(x))
            return

        def attention(given: mx.array) -> mx.array:
            y, update = self._model.attention(given, layer, old, self._span, no_probe)
            self._updates[layer] = update
            return y

        self._answer(self._computed(x, attention, lambda: update_arrays(self._updates[layer])))

    def _mlp(self, asked: Message) -> None:
        layer, x = asked["layer"], self._input(asked)
        if not self._part.inner(layer):
            self._answer(np.zeros_like(x))
            return
        self._answer(self._computed(x, lambda given: self._model.dense_mlp(given, layer, no_probe)))

    def _head(self, asked: Message) -> None:
        width = len(divide(self._model.config.vocab_size, 0, self._part.size))
        logits = self._computed(self._input(asked), self._model.logits)
        self._answer(widened(logits, width))

    def _gather(self, asked: Message) -> None:
        arrays, config = self._states[asked["number"]].arrays(), self._part.config
        count = len(divide(self._model.config.kda_num_heads, 0, self._part.size))
        for name in split_names(arrays):
            self._answer(lengthened(by_head(name, arrays[name], config), count))

    def _scatter(self, asked: Message) -> None:
        config, arrays = self._model.config, {}
        for name, shape in array_shapes(config, asked["length"]).items():
            blank = given(name, np.zeros(shape, np.float32), config)
            arrays[name] = taken(
                name, self._exchange.end(self._exchange.begin(blank), self._wait)[0], self._part
            )
        state = State.from_arrays(self._part.config, self._model.dtype, arrays, asked["length"])
        self._made = lambda: state

    def _input(self, asked: Message) -> Floats:
        """Rank 0's x [T, D]."""
        nothing = np.zeros((asked["tokens"], self._model.config.hidden_size), np.float32)
        return self._exchange.end(self._exchange.begin(nothing), self._wait)[0]

    def _answer(self, mine: Floats) -> None:
        self._exchange.end(self._exchange.begin(mine), self._wait)

    def _computed(
        self,
        x: Floats,
        work: Callable[[mx.array], mx.array],
        more: Callable[[], list[mx.array]] = list,
    ) -> Floats:
        return self._tried(lambda: self._run(x, work, more))

    def _run(
        self,
        x: Floats,
        work: Callable[[mx.array], mx.array],
        more: Callable[[], list[mx.array]] = list,
    ) -> Floats:
        """work(x in the activation dtype) on the host in float32; `more` is to be evaluated with it."""
        y = work(mx.array(x).astype(self._model.dtype)).astype(mx.float32)
        self._evaluate([y, *more()])
        return np.array(y)
