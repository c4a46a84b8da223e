"""A loaded model (Engine) and one timeline of tokens with its state (Session).

Owns loading, the commit of states, counters and session files. Knows no HTTP, prints nothing, and
leaves text and sampling to `generation.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from .backend import Backend, make_backend
from .checkpoint.hub import resolve
from .checkpoint.mlx_lm import open_checkpoint
from .checkpoint.safetensors import read_header
from .checkpoint.snapshot import Checkpoint, read_tensor
from .checkpoint.writer import write_safetensors
from .clock import Clock
from .config import ModelConfig
from .dense_native import choose_dense
from .devices import choose
from .errors import K3Error, ModelFilesError, UsageError
from .experts.options import expert_cache_from_environment, stream_options
from .governor import Governor, plan_memory
from .memory import parse_size, peak_memory_bytes
from .needs import backend_needs, default_dtype
from .ranks.launch import joined
from .ranks.part import Part
from .reference.model import Hooks
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .ranks.team import Team

_NOTE = "k3mlx.note."  # before the names of notes in a session file


class Cancelled(K3Error):
    """The work was stopped between two layers on request; the session holds what was fed before."""


def load(
    model: str | Path | None = None,
    *,
    backend: str = "auto",
    device: str = "auto",
    dtype: str | None = None,
    experts_device: str = "cpu",
    experts_kernel: str = "auto",
    dense_kernel: str = "auto",
    cpu_threads: int | None = None,
    memory: int | str = "auto",
    expert_cache: int | str = "auto",
    cache_policy: str | None = None,
    io_threads: int | None = None,
    direct_io: str | bool | None = None,
    pipe: str | bool | None = None,
    lookahead: str | int | None = None,
    warm_start: str | bool | None = None,
    expert_trace: str | Path | None = None,
    model_dirs: Sequence[str | Path] = (),
    prefill_step_size: int | str = "auto",
    session_memory: int | str = 0,
    dense_parallel: bool = False,
) -> Engine:
    """Open a Kimi K3 and load its dense weights.

    model: a folder, a repo id in the Hugging Face cache, or None for the small model of the package.
    backend: `mlx`, `numpy`, or `auto` for mlx where it has a GPU, else numpy. device: `gpu`, `cpu`, or `auto`,
    which leaves it to K3_METAL (1 Metal or nothing, 0 never a GPU) and to what is there.
    dtype: what the dense parts compute in: float32 (default) or float64 on numpy; bfloat16 (default on a GPU)
    or float32 (default on the CPU) on mlx. experts_device: `cpu`, or `gpu` for mlx on a GPU.
    experts_kernel: what computes them on the CPU: `native` (C), or `numpy` on numpy and `stream` (CPU streams of
    MLX) on mlx; `auto` is native where it is built and has computed right on this machine.
    dense_kernel: what multiplies with dense weights on numpy: `native` (C, on the weights as they are stored) or
    `numpy` (on weights widened in memory); `auto` is native in float32 for all but small models, where it can.
    cpu_threads: threads of the C kernels (or CPU streams on mlx); None is OMP_NUM_THREADS, else every core.
    memory: bytes that the whole process may use (`64GB`, or an integer); `auto` is what the machine can give.
    expert_cache: bytes of expert payload kept in memory; `auto` is K3_EXPERT_GB, else what memory has left.
    cache_policy: `lru`, `decayed` or `s3fifo`. io_threads: reads at once (K3_LOAD_THREADS, else 4).
    direct_io: `on` past the page cache, `off` through it, `auto` as K3_DIRECT or a probe of the disk says.
    pipe: whether reads go on while experts are computed (K3_PIPE, else `on`). lookahead: `off` (default), `auto` or how
    many experts of the next layer are read on a guess. warm_start: whether to read at first what was in memory
    last time (`on` is for a process alone). expert_trace: a file to write the routing to. model_dirs: folders with
    shards that are not in the model's own, or with copies of them: reads are spread over their drives.
    prefill_step_size: prompt tokens per forward pass, `auto` the largest of a ladder that memory allows; the
    one setting here, with backend, device and dtype, that may change the last bits of a result.
    session_memory: set aside within `memory` for sessions that are kept (`kept.KeptSessions`) beside the one
    in work. In a process that `mlx.launch` started with others, the routed experts are spread over all of them: rank 0
    gets the engine, on the others this serves rank 0 and ends with SystemExit when it closes. dense_parallel: heads of
    attention, widths of MLPs and rows of the head are split over them too (`ranks.part`).
    Raises UsageError, ModelFilesError or ResourceError.
    """
    step = _step(prefill_step_size)
    limit = None if memory == "auto" else parse_size(memory, "memory")
    budget = expert_cache_from_environment() if expert_cache == "auto" else None
    if expert_cache != "auto":
        budget = parse_size(expert_cache, "expert_cache")
    streaming = stream_options(
        io_threads, direct_io, pipe, lookahead, cache_policy, warm_start, expert_trace, model_dirs
    )
    with joined(dense_parallel) as team, ExitStack() as on_failure:
        choice = choose(_preferred(dtype, team) if backend == "auto" else backend, device)
        folder = resolve(model)
        checkpoint = open_checkpoint(folder, streaming.model_dirs)
        on_failure.callback(checkpoint.close)
        if team is not None:  # what was in memory last time may be another rank's by now
            if streaming.warm_start == "on":
                raise UsageError("warm_start is on, which several ranks cannot have: leave it out")
            streaming = replace(streaming, warm_start="off")
        dense, note = choose_dense(
            dense_kernel,
            choice.backend,
            dtype or default_dtype(choice),
            checkpoint.config.hidden_size,
            cpu_threads,
        )
        part = Part.of(checkpoint, team.rank, team.size) if team is not None and dense_parallel else None
        needs = backend_needs(choice, checkpoint, dtype, as_stored=dense is not None, part=part)
        kept, ranks = parse_size(session_memory, "session_memory"), None
        if team is not None:
            from .ranks.follow import follow, lead

            computed_in = dtype or default_dtype(choice)
            if team.rank:
                follow(
                    team, checkpoint, choice, needs, limit, budget, streaming, computed_in, part,
                    experts_device, experts_kernel, cpu_threads,
                )  # fmt: skip
                raise SystemExit(0)
        plan = plan_memory(replace(needs, state=needs.state + kept), limit, budget, step)
        if team is not None:
            ranks = lead(team, checkpoint, choice, plan.chunk, kept, computed_in, part)
        made = make_backend(
            choice, checkpoint, dtype, budget, experts_device, experts_kernel, cpu_threads, streaming, plan,
            ranks=ranks, dense=dense,
        )  # fmt: skip
        made.notes = (*made.notes, *([] if note is None else [note]))
        on_failure.pop_all()
    return Engine(folder, checkpoint, made, plan.chunk, Governor(plan, made.store))


def _preferred(dtype: str | None, team: Team | None) -> str:
    """The backend that `auto` means, if anything decides it before the machine has been asked."""
    if team is not None:
        return "mlx"
    return "numpy" if dtype == "float64" else "auto"


def _step(size: int | str) -> int | None:
    """Prompt tokens of a pass as asked for, None for `auto`."""
    if size == "auto":
        return None
    if isinstance(size, str) and size.isdecimal():
        size = int(size)
    if isinstance(size, str) or size < 1:
        raise UsageError(f"prefill_step_size is {size}, expected auto or at least 1")
    return size


@dataclass
class Counters:
    """What the engine has done since it was loaded."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class Engine:
    """A loaded model. Sessions of one engine share its weights and expert cache; one runs at a time."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        backend: Backend,
        prefill_step_size: int,
        governor: Governor,
    ) -> None:
        self.folder = folder
        self.backend = backend
        self.prefill_step_size = prefill_step_size
        self.governor = governor
        self.on_layer: Callable[[int, int], None] | None = None  # told layers done and to do, in a prompt
        self.closed = False
        self.counters = Counters()
        self.clock = Clock()
        self._checkpoint = checkpoint

    @property
    def config(self) -> ModelConfig:
        return self._checkpoint.config

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary, read at the first operation on text. Raises ModelFilesError if it is not there."""
        return Tokenizer.load(self.folder, vocab_size=self.config.vocab_size)

    def session(self) -> Session:
        """A new timeline without tokens."""
        return Session(self)

    def load_session(self, path: str | Path) -> Session:
        """The session that `Session.save` wrote, for the same model, backend and dtype.

        Raises ModelFilesError for a damaged file, UsageError for one of another model.
        """
        header = read_header(Path(path))
        if header.metadata.get("k3mlx.session") != self.identity():
            raise UsageError(f"{path} was saved by another model, backend or dtype; start a new session")
        arrays = {name: read_tensor(info) for name, info in header.tensors.items()}
        stored = arrays.pop("ids", None)
        if stored is None or stored.ndim != 1 or stored.dtype != np.int64:
            raise ModelFilesError(f"{path}: expected a tensor ids of int64 [T]; start a new session")
        ids = stored.tolist()
        session = Session(self)
        session._commit(ids, self.backend.import_state(arrays, len(ids)))
        notes = {name: text for name, text in header.metadata.items() if name.startswith(_NOTE)}
        session.notes = {name.removeprefix(_NOTE): text for name, text in notes.items()}
        return session

    def report(self) -> dict[str, Any]:
        """Counts and times since loading; byte counts are integers, times seconds.

        On MLX parts that are evaluated together count as one: the router and what a layer before has left
        undone as `attention`.
        """
        counters, seconds = self.counters, self.clock.seconds
        experts = self.backend.experts_report()
        wait = experts["wait_seconds"]
        return {
            "backend": self.backend.name,
            "device": self.backend.device,
            "dtype": self.backend.dtype,
            "prompt_tokens": counters.prompt_tokens,
            "generated_tokens": counters.generated_tokens,
            "decode_steps": counters.decode_steps,
            "seconds": {
                "prefill": counters.prefill_seconds,
                "decode": counters.decode_seconds,
                **{part: seconds.get(part, 0.0) for part in ("attention", "router", "mlp", "head", "other")},
                "experts": seconds.get("experts", 0.0) - wait,
                "expert_wait": wait,
            },
            "peak_memory_bytes": peak_memory_bytes(),
            "prefill_chunk": self.prefill_step_size,
            "experts": experts,
            "dense": self.backend.dense_report(),
            "memory": self.governor.report(),
            "parts": self.backend.parts_report(),
            "runtime": self.backend.runtime_report(),
            "ranks": self.backend.ranks_report(),
        }

    def close(self) -> None:
        """Release files and memory. Sessions of this engine cannot be fed any more."""
        self.closed = True
        self.backend.close()
        self._checkpoint.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def identity(self) -> str:
        """What a session file must agree with, or any work that goes on later: the model's numbers and weights, the
        backend and its dtype."""
        return json.dumps(["2", self._fingerprint, self.backend.name, self.backend.dtype])

    @cached_property
    def _fingerprint(self) -> str:
        """Of the config, of every weight that is a vector (norms, biases, decays) and of what is stored as codes."""
        digest = hashlib.sha256(repr(self.config).encode())
        for name, matrix in sorted(self._checkpoint.quantized.items()):
            digest.update(f"{name} {matrix.mode} {matrix.bits} {matrix.group_size}".encode())
        for name, info in sorted(self._checkpoint.tensors.items()):
            if len(info.shape) == 1:
                digest.update(name.encode() + self._checkpoint.raw(name).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Snapshot:
    """A point of a session's timeline; holds the state by reference, so taking one copies nothing."""

    ids: tuple[int, ...]
    state: Any

    @property
    def nbytes(self) -> int:
        """Bytes of state that this snapshot keeps alive, those it shares with others included."""
        return int(self.state.nbytes)


class Session:
    """One timeline of tokens. A call that raises leaves it as it was before the pass that failed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.notes: dict[str, str] = {}  # text of the caller's, by name, that a session file keeps
        self._commit([], engine.backend.new_state())

    @property
    def ids(self) -> list[int]:
        """What has been fed."""
        return list(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def feed(
        self,
        ids: Sequence[int],
        all_logits: bool = False,
        should_stop: Callable[[], bool] | None = None,
        on_pass: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Advance by `ids` and return logits, float32 `[vocab]` after the last id, or `[len(ids), vocab]`.

        Runs `prefill_step_size` ids at a time. `should_stop` is asked between layers; when it says yes,
        Cancelled is raised and the passes finished so far stay fed. `on_pass` is told how many of `ids`
        are fed, after each pass. Raises UsageError for ids out of range or beyond the context, K3Error when
        the model computes NaN or infinity.
        """
        self._check(ids)
        started = perf_counter()
        decoding = len(ids) == 1 and bool(self._ids)
        step = self.engine.prefill_step_size
        rows = []
        layers = self.engine.config.num_hidden_layers
        total = layers * -(-len(ids) // step)
        tell = None if decoding else self.engine.on_layer
        try:
            for start in range(0, len(ids), step):
                done = start // step * layers

                def before_layer(layer: int, done: int = done) -> None:
                    if should_stop is not None and should_stop():
                        raise Cancelled(f"stopped before layer {layer}")
                    if tell is not None:
                        tell(done + layer, total)

                rows.append(self._pass(list(ids[start : start + step]), all_logits, before_layer))
                if on_pass is not None:
                    on_pass(min(start + step, len(ids)))
        finally:
            if tell is not None:
                tell(total, total)
            counters, elapsed = self.engine.counters, perf_counter() - started
            if decoding:
                counters.decode_seconds += elapsed
                counters.decode_steps += 1
            else:
                counters.prefill_seconds += elapsed
                counters.prompt_tokens += len(ids)
        return np.concatenate(rows) if all_logits else rows[-1]

    def snapshot(self) -> Snapshot:
        """The present point of the timeline, to come back to."""
        return Snapshot(tuple(self._ids), self._state)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back (or over) to a snapshot of a session of the same engine."""
        self._commit(list(snapshot.ids), snapshot.state)

    def save(self, path: str | Path) -> None:
        """Write ids, state and notes to one safetensors file, complete or not at all.

        Raises UsageError for a folder, K3Error when the file cannot be written.
        """
        arrays = self.engine.backend.export_state(self._state)
        ids = np.array(self._ids, np.int64)
        notes = {f"{_NOTE}{name}": text for name, text in self.notes.items()}
        if Path(path).is_dir():
            raise UsageError(f"{path} is a folder, expected the name of a file")
        metadata = {"k3mlx.session": self.engine.identity(), **notes}
        try:
            write_safetensors(path, {"ids": ids, **arrays}, metadata)
        except OSError as error:
            raise K3Error(f"{path}: cannot be written ({error.strerror or error})") from None

    def _commit(self, ids: list[int], state: Any) -> None:
        self._ids, self._state = ids, state

    def _pass(self, ids: list[int], all_logits: bool, before_layer: Callable[[int], None]) -> np.ndarray:
        def begin_layer(layer: int) -> None:
            before_layer(layer)
            engine.governor.check()

        engine = self.engine
        hooks = Hooks(before_layer=begin_layer, clock=engine.clock, fed=self._ids)
        engine.clock.resume()
        try:
            logits, state = engine.backend.forward(ids, self._state, all_logits, hooks)
        finally:
            engine.clock.pause()
        if not np.isfinite(logits).all():
            raise K3Error(self._non_finite(ids))
        self._commit(self._ids + ids, state)
        return logits.astype(np.float32, copy=False)

    def _check(self, ids: Sequence[int]) -> None:
        config = self.engine.config
        if self.engine.closed:
            raise UsageError("the engine is closed; feed its sessions before that, or load it again")
        if not isinstance(ids, (Sequence, np.ndarray)) or isinstance(ids, (str, bytes)):
            raise UsageError(f"ids are {type(ids).__name__}, expected a sequence of token ids")
        if len(ids) == 0:
            raise UsageError("nothing to feed: expected at least one id")
        for id in ids:
            if not isinstance(id, (int, np.integer)) or isinstance(id, bool):
                raise UsageError(f"token id {id!r} is {type(id).__name__}, expected an integer")
            if not 0 <= id < config.vocab_size:
                raise UsageError(f"token id {id} is out of range, expected 0 to {config.vocab_size - 1}")
        if len(self._ids) + len(ids) > config.max_position_embeddings:
            raise UsageError(
                f"{len(self._ids) + len(ids)} tokens, expected at most {config.max_position_embeddings},"
                " the context of this model: shorten the prompt"
            )

    def _non_finite(self, ids: list[int]) -> str:
        """Run the failed pass again, watching every stage, and say where NaN or infinity first appears."""
        first: list[str] = []

        def probe(stage: str, array: np.ndarray) -> None:
            if not first and not np.isfinite(array).all():
                first.append(stage)

        self.engine.backend.forward(ids, self._state, True, Hooks(probe=probe))
        start = len(self._ids)
        span = f"position {start}" if len(ids) == 1 else f"positions {start} to {start + len(ids) - 1}"
        stage = first[0] if first else "none on a second run"
        return (
            f"logits are not finite at {span}; the first stage with NaN or infinity is {stage}:"
            " the weights are damaged"
        )
