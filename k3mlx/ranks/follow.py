"""A rank beyond 0: it has experts and nothing else, and computes what rank 0's routers ask of it.

Owns its loop. It opens the checkpoint, proves that it is rank 0's, and serves layer after layer until rank 0 says
good-bye; a failure here ends the run on every rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from k3mlx import __version__
from k3mlx.checkpoint.snapshot import Checkpoint, read_tensor
from k3mlx.devices import Choice
from k3mlx.errors import UsageError
from k3mlx.experts.options import StreamOptions
from k3mlx.experts.store import ExpertStore
from k3mlx.governor import Governor, MemoryPlan, plan_memory
from k3mlx.kernels import Kernels
from k3mlx.kernels.cpu import default_threads
from k3mlx.model.owner import OWNER, Call
from k3mlx.model.room import make_room
from k3mlx.model.routed import RoutedExperts, choose_native
from k3mlx.model.slots import MlxSlots
from k3mlx.needs import DenseBytes, Needs
from k3mlx.watchdog import Watchdog

from .exchange import unpack
from .lead import Lead
from .links import Message
from .owners import own
from .team import Team

REDO_TIMES = 3  # paths that a layer is tried on: GPU, CPU streams, numpy


def facts(checkpoint: Checkpoint) -> dict[str, str]:
    """What all ranks must agree on: versions, the model's numbers, and a sample of every layer's experts."""
    config = checkpoint.config
    digest = hashlib.sha256()
    for layer in filter(config.is_moe, range(config.num_hidden_layers)):
        tensors = checkpoint.expert_tensors(layer, layer % config.num_experts)
        name, info = min(tensors.items(), key=lambda item: (item[1].nbytes, item[0]))
        digest.update(f"{layer} {name} {info.dtype} {info.shape}".encode() + read_tensor(info).tobytes())
    return {
        "k3mlx": __version__,
        "mlx": version("mlx"),
        "config": hashlib.sha256(repr(config).encode()).hexdigest()[:16],
        "experts": digest.hexdigest()[:16],
    }


def lead(team: Team, checkpoint: Checkpoint, choice: Choice, chunk: int) -> Lead:
    """Rank 0's view of the others, when they have all opened the same model. `chunk`: tokens of a pass at most."""
    _check(choice)
    team.agree(facts(checkpoint), chunk)
    return Lead(team)


def follow(
    team: Team,
    checkpoint: Checkpoint,
    choice: Choice,
    needs: Needs,
    memory: int | None,
    expert_cache: int | None,
    streaming: StreamOptions,
    experts_device: str = "cpu",
    experts_kernel: str = "auto",
    threads: int | None = None,
) -> None:
    """Serve rank 0 until it is done. Arguments as `k3mlx.load` has understood them."""
    _check(choice)
    chunk = team.agree(facts(checkpoint))
    plan = plan_memory(experts_only(needs), memory, expert_cache, chunk)
    follower = Follower(team, checkpoint, choice, plan, streaming, experts_device, experts_kernel, threads)
    try:
        follower.serve()
    finally:
        follower.close()
    team.close()


def _check(choice: Choice) -> None:
    if choice.backend != "mlx":
        raise UsageError("several ranks exchange through MLX: use --backend mlx, or start one process alone")


def experts_only(needs: Needs) -> Needs:
    """The memory of a rank without dense weights and sessions."""
    return replace(needs, dense=DenseBytes((), 0, ()), ring=None, state=0)


class Follower:
    """The experts of one rank, computed on the CPU, or by MLX on its GPU if `experts_device` says so."""

    def __init__(
        self,
        team: Team,
        checkpoint: Checkpoint,
        choice: Choice,
        plan: MemoryPlan,
        streaming: StreamOptions,
        experts_device: str = "cpu",
        experts_kernel: str = "auto",
        threads: int | None = None,
    ) -> None:
        self._team = team
        self._config = checkpoint.config
        native, _ = choose_native(experts_kernel, checkpoint, threads)
        self._slots = MlxSlots()
        self._store = ExpertStore(checkpoint, plan.cache, replace(streaming, warm_start="off"), self._slots)
        self._governor = Governor(plan, self._store)
        self._watchdog = Watchdog()
        device = choice.device if experts_device == "gpu" else "cpu"

        def build() -> RoutedExperts:
            self._room = make_room(
                device, Kernels(None), self._watchdog, experts_device, native, threads or default_threads()
            )
            return RoutedExperts(self._store, self._config, self._room, native)

        self._routed = OWNER.call(lambda call: build(), self._watchdog)

    def serve(self) -> None:
        """Answer rank 0 until it closes. Raises what ends the run."""
        link = self._team.links[0]
        while (message := link.receive())["op"] != "bye":
            if message["op"] == "report":
                link.send({"op": "report", "report": self._report()})
            else:
                OWNER.call(partial(self._layer, message), self._watchdog)
                self._governor.check()

    def close(self) -> None:
        self._store.close()

    def _layer(self, asked: Message, call: Call) -> None:
        """Both collectives of a layer, and between them this rank's part of the sum."""
        exchange, config = self._team.exchange, self._config
        width, chosen = config.routed_expert_hidden_size, config.num_experts_per_token
        nothing = np.zeros((asked["tokens"], width + 2 * chosen), np.float32)
        given = exchange.end(exchange.begin(nothing), self._evaluate)
        latent, ids, weights = unpack(given[0], chosen)
        exchange.end(exchange.begin(self._mix(asked["layer"], latent, ids, weights)), self._evaluate)
        self._slots.give_back()

    def _mix(self, layer: int, latent: Any, ids: Any, weights: Any) -> Any:
        experts = own(layer, np.unique(ids).tolist(), self._team.rank, self._team.size)
        for left in reversed(range(REDO_TIMES)):
            self._room.begin()
            try:
                with self._routed.request(layer, ids, experts) as request:
                    return self._routed.mix(layer, mx.array(latent), ids, weights, request)
            except RuntimeError as error:
                if not left:
                    raise
                failure = f"{type(error).__name__}: {error}"
            self._room.recover(failure)
        raise AssertionError("the last try returns or raises")

    def _evaluate(self, arrays: list[mx.array]) -> None:
        # rank 0 holds the deadline of the whole layer; ours is for the case that it does not
        self._room.evaluate("an exchange with the other ranks", arrays, 4 * self._room.deadline(0))

    def _report(self) -> dict[str, Any]:
        return {
            "rank": self._team.rank,
            "experts": self._store.report(),
            "traffic": asdict(self._team.exchange.traffic),
            "memory": self._governor.report(),
        }
