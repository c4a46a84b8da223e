"""A rank beyond 0: it has experts, maybe a part of the dense weights, and computes what rank 0 asks of it.

Owns its loop. It opens the checkpoint, proves that it is rank 0's, and serves layer after layer until rank 0 says
good-bye; a failure here ends the run on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from k3mlx import __version__
from k3mlx.checkpoint.names import layer_specs
from k3mlx.checkpoint.snapshot import Checkpoint, read_tensor
from k3mlx.devices import Choice
from k3mlx.errors import UsageError
from k3mlx.experts.options import StreamOptions
from k3mlx.experts.store import ExpertStore
from k3mlx.governor import Governor, MemoryPlan, plan_memory
from k3mlx.kernels import Kernels
from k3mlx.kernels.cpu import default_threads
from k3mlx.model.backend import DTYPES, usable_kernels, wire
from k3mlx.model.model import MlxModel
from k3mlx.model.owner import OWNER, Call
from k3mlx.model.room import log, make_room
from k3mlx.model.routed import RoutedExperts, choose_native, in_mlx_memory
from k3mlx.model.slots import MlxSlots
from k3mlx.model.weights import Loader
from k3mlx.needs import Needs, experts_only, mlx_cache_limit
from k3mlx.watchdog import Watchdog

from .dense_part import DensePart
from .exchange import Floats, unpack
from .lead import Lead
from .links import Message
from .owners import own
from .part import Part
from .split import SplitLead
from .team import Team

REDO_TIMES = 3  # paths that a layer is tried on: GPU, CPU streams, numpy


def facts(checkpoint: Checkpoint, dtype: str, part: Part | None) -> dict[str, str]:
    """What all ranks must agree on: versions, the model's numbers, and a sample of every layer's experts, and of its
    dense weights if these are split."""
    config = checkpoint.config
    split = {"--dense-parallel": "off"}
    if part is not None:
        split = {"--dense-parallel": "on", "--dtype": dtype, "dense weights": _dense_sample(checkpoint)}
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
        **split,
    }


def _dense_sample(checkpoint: Checkpoint) -> str:
    """Of each layer's smallest tensor, and of how matrices are stored."""
    digest = hashlib.sha256()
    for layer in range(checkpoint.config.num_hidden_layers):
        spec = min(layer_specs(checkpoint.config, layer), key=lambda spec: (spec.nbytes, spec.name))
        digest.update(spec.name.encode() + checkpoint.raw(spec.name).tobytes())
    for name, codes in sorted(checkpoint.quantized.items()):
        digest.update(f"{name} {codes.mode} {codes.bits} {codes.group_size}".encode())
    return digest.hexdigest()[:16]


def lead(
    team: Team,
    checkpoint: Checkpoint,
    choice: Choice,
    chunk: int,
    sessions: int,
    dtype: str,
    part: Part | None,
) -> Lead:
    """Rank 0's view of the others, when they have all opened the same model. chunk: tokens of a pass at most; sessions:
    bytes set aside for those that are kept."""
    _check(choice)
    team.agree(facts(checkpoint, dtype, part), {"chunk": chunk, "sessions": sessions})
    return Lead(team) if part is None else SplitLead(team, part, checkpoint.config)


def follow(
    team: Team,
    checkpoint: Checkpoint,
    choice: Choice,
    needs: Needs,
    memory: int | None,
    expert_cache: int | None,
    streaming: StreamOptions,
    dtype: str,
    part: Part | None = None,
    experts_device: str = "cpu",
    experts_kernel: str = "auto",
    threads: int | None = None,
) -> None:
    """Serve rank 0 until it is done. Arguments as `k3mlx.load` has understood them."""
    _check(choice)
    settings = team.agree(facts(checkpoint, dtype, part))
    needs = experts_only(needs) if part is None else replace(needs, state=needs.state + settings["sessions"])
    plan = plan_memory(needs, memory, expert_cache, settings["chunk"])
    follower = Follower(
        team, checkpoint, choice, plan, streaming, dtype, part, experts_device, experts_kernel, threads
    )
    try:
        follower.serve()
    finally:
        follower.close()
    team.close()


def _check(choice: Choice) -> None:
    if choice.backend != "mlx":
        raise UsageError("several ranks exchange through MLX: use --backend mlx, or start one process alone")


class Follower:
    """The experts of one rank, computed on the CPU, or by MLX on its GPU if `experts_device` says so; with a part of
    the dense weights, which MLX computes on the chosen device."""

    def __init__(
        self,
        team: Team,
        checkpoint: Checkpoint,
        choice: Choice,
        plan: MemoryPlan,
        streaming: StreamOptions,
        dtype: str,
        part: Part | None = None,
        experts_device: str = "cpu",
        experts_kernel: str = "auto",
        threads: int | None = None,
    ) -> None:
        self._team = team
        self._model: MlxModel | None = None
        self._dense: DensePart | None = None
        self._config = checkpoint.config
        self._chunk = plan.chunk
        native, _ = choose_native(experts_kernel, checkpoint, threads)
        self._slots = MlxSlots()
        slots = self._slots if in_mlx_memory(native, experts_device) else None
        self._store = ExpertStore(checkpoint, plan.cache, streaming, slots)
        self._governor = Governor(plan, self._store)
        self._watchdog = Watchdog()
        device = choice.device if experts_device == "gpu" or part is not None else "cpu"
        kernels, lines = Kernels(None), list[str]()
        if part is not None:
            kernels, lines = usable_kernels(device, choice.kernels, choice.must)

        def build() -> None:
            mx.set_cache_limit(mlx_cache_limit(plan.memory))
            self._room = make_room(
                device, kernels, self._watchdog, experts_device, native, threads or default_threads()
            )
            self._routed = RoutedExperts(self._store, self._config, self._room, native)
            if part is None:
                return
            loader = Loader(
                checkpoint, DTYPES[dtype], in_place=device != "cuda", threads=self._store.options.io_threads,
                direct=self._store.files.direct, part=part,
            )  # fmt: skip
            with mx.stream(self._room.stream):
                self._model = MlxModel(loader, self._store, self._room, plan.resident, native)
                self._dense = DensePart(
                    self._model, part, team.exchange, self._tried, self._wait, self._evaluate
                )
            lines.extend(wire(mx.get_active_memory()) if device == "metal" else ())

        OWNER.call(lambda call: build(), self._watchdog)
        for line in lines:
            log.warning("k3mlx: rank %d: %s", team.rank, line)

    def serve(self) -> None:
        """Answer rank 0 until it closes. Raises what ends the run."""
        link = self._team.links[0]
        while (message := link.receive())["op"] != "bye":
            if message["op"] == "report":
                link.send({"op": "report", "report": self._report()})
            else:
                OWNER.call(partial(self._serve, message), self._watchdog)
                self._governor.check()

    def close(self) -> None:
        def drop(call: Call) -> None:
            if self._model is not None:
                self._model.close()

        OWNER.call(drop, self._watchdog)
        self._store.close()

    def _serve(self, asked: Message, call: Call) -> None:
        with mx.stream(self._room.stream):
            if asked["op"] == "layer":
                self._layer(asked)
            else:
                assert self._dense is not None, "all ranks agreed on --dense-parallel"
                self._dense.serve(asked)

    def _layer(self, asked: Message) -> None:
        """Both collectives of a layer's experts, and between them this rank's part of the sum."""
        exchange, config, layer = self._team.exchange, self._config, asked["layer"]
        width, chosen = config.routed_expert_hidden_size, config.num_experts_per_token
        packed = width + 2 * chosen
        stream = 0 if self._dense is None else config.hidden_size
        nothing = np.zeros((asked["tokens"], packed + stream), np.float32)
        given = exchange.end(exchange.begin(nothing), self._wait)[0]
        latent, ids, weights = unpack(given[:, :packed], chosen)
        experts = own(layer, np.unique(ids).tolist(), self._team.rank, self._team.size)

        def sums() -> Floats:
            with self._routed.request(layer, ids, experts) as request:  # reads are on their way
                shared = [] if self._dense is None else [self._dense.shared(layer, given[:, packed:])]
                mine = self._routed.mix(layer, mx.array(latent), ids, weights, request)
            return np.concatenate([mine, *shared], axis=1)

        exchange.end(exchange.begin(self._tried(sums)), self._wait)
        self._slots.give_back()

    def _tried(self, work: Callable[[], Floats]) -> Floats:
        """The result of work, done again on another path when it fails."""
        for left in reversed(range(REDO_TIMES)):
            self._room.begin()
            try:
                with mx.stream(self._room.stream):  # another one after a fallback
                    return work()
            except (RuntimeError, ValueError) as error:
                if not left:
                    raise
                failure = f"{type(error).__name__}: {error}"
            self._room.recover(failure)
        raise AssertionError("the last try returns or raises")

    def _wait(self, arrays: list[mx.array]) -> None:
        # rank 0 holds the deadline of the whole layer; ours is for the case that it does not
        self._room.evaluate("an exchange with the other ranks", arrays, 4 * self._room.deadline(0))

    def _evaluate(self, arrays: list[mx.array]) -> None:
        config = self._config
        largest = config.hidden_size * max(config.vocab_size, 3 * config.intermediate_size)
        self._room.evaluate("a part of the dense weights", arrays, self._room.deadline(self._chunk * largest))

    def _report(self) -> dict[str, Any]:
        return {
            "rank": self._team.rank,
            "experts": self._store.report(),
            "traffic": asdict(self._team.exchange.traffic),
            "memory": self._governor.report(),
            "states": 0 if self._dense is None else self._dense.states,
        }
