"""The MLX backend of the engine: one loaded model on Metal, CUDA or the CPU device of MLX.

Owns loading, the redo of a failed step and the commit of a good one. All of it happens in the thread that
owns MLX (`owner.py`); this object may be called from any. `MLX_ENABLE_TF32=0` is set before mlx is imported,
by `k3mlx.devices`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.devices import TF32
from k3mlx.errors import K3Error, ResourceError, UsageError
from k3mlx.experts.options import StreamOptions
from k3mlx.experts.store import ExpertStore
from k3mlx.kernels import Kernels
from k3mlx.kernels.cpu import default_threads
from k3mlx.ranks.lead import Lead
from k3mlx.reference.model import Hooks
from k3mlx.watchdog import Watchdog, save_ids

from .model import MlxModel
from .owner import OWNER, Call
from .probe import surprises
from .room import EndOfRun, Room, log, make_room
from .routed import choose_native, in_mlx_memory
from .slots import MlxSlots
from .state import State
from .weights import Loader

T = TypeVar("T")
DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
CACHE_BYTES = 1 << 30  # freed buffers that MLX may keep, unless a plan says otherwise


class MlxBackend:
    """The model in MLX.

    device: `metal`, `cuda` or `cpu`, known to be there. dtype: of the activations and the dense weights.
    experts_device: `cpu`, or `gpu` for MLX's own matmul on the GPU. experts_kernel: what computes them on the CPU:
    `native` (C), `stream` (CPU streams of MLX), or `auto`: native where it is built and has computed right on this
    machine just now. threads: of the C kernels, or CPU streams.
    kernels: whether the kernels of this package are used on the GPU, those that have passed the self-test; must: one
    that has not is an error. cache_bytes: freed buffers that MLX may keep. resident: layers whose dense weights
    stay in memory, all if None. thin: embedding and head stay on disk, and no layer is read ahead.
    """

    name = "mlx"
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        expert_cache: int | None,
        streaming: StreamOptions | None = None,
        *,
        device: str = "cpu",
        kernels: bool = False,
        must: bool = False,
        experts_device: str = "cpu",
        experts_kernel: str = "auto",
        threads: int | None = None,
        cache_bytes: int | None = None,
        resident: Collection[int] | None = None,
        thin: bool = False,
        ranks: Lead | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise UsageError(f"dtype is {dtype!r}, expected bfloat16 or float32 on the mlx backend")
        self.config = checkpoint.config
        self.dtype = dtype
        native, why = choose_native(experts_kernel, checkpoint, threads)
        threads = threads or default_threads()
        self.watchdog = Watchdog()
        part = None if ranks is None else ranks.part
        self._local = self.config if part is None else part.config  # heads of this process
        if ranks is not None:
            ranks.team.fed, ranks.experts_report = lambda: self.watchdog.ids, self.experts_report
            ranks.wait = lambda arrays: self.room.evaluate("a state's parts", arrays, self.room.deadline(0))
        self._slots, self._native = MlxSlots(), native
        slots = self._slots if in_mlx_memory(native, experts_device) else None
        self.store = ExpertStore(checkpoint, expert_cache, streaming, slots)

        launchers, gated = usable_kernels(device, kernels, must)

        def build(call: Call) -> tuple[Room, MlxModel, list[str]]:
            mx.set_cache_limit(CACHE_BYTES if cache_bytes is None else cache_bytes)
            room = make_room(device, launchers, self.watchdog, experts_device, native, threads, ranks)
            loader = Loader(
                checkpoint, DTYPES[dtype], in_place=device != "cuda", thin=thin,
                threads=self.store.options.io_threads, direct=self.store.files.direct, part=part,
            )  # fmt: skip
            with mx.stream(room.stream):
                notes = surprises()
                model = MlxModel(loader, self.store, room, resident, native)
            if device == "metal":
                notes += wire(mx.get_active_memory())
            return room, model, notes

        try:
            self.room, model, notes = OWNER.call(build, self.watchdog)
        except BaseException as error:
            self.store.close()
            if isinstance(error, RuntimeError):
                raise ResourceError(f"the model cannot be loaded into mlx: {error}") from None
            raise
        self.model: MlxModel | None = model
        self._formats = model.formats() | {"experts": _expert_format(checkpoint)}
        self._formats = {part: form for part, form in self._formats.items() if part in _parts(checkpoint)}
        spread = [] if ranks is None else [ranks.describe()]
        self.notes = (*spread, *gated, *notes, *([] if why is None else [why]), *self._slow_formats())

    @property
    def device(self) -> str:
        """Where the dense parts run now: `metal`, `cuda` or `cpu`."""
        return self.room.kind

    def new_state(self) -> State:
        return self._call(lambda: State.empty(self._local, DTYPES[self.dtype]))

    def forward(
        self, ids: Sequence[int], state: State, all_logits: bool, hooks: Hooks
    ) -> tuple[np.ndarray, State]:
        return OWNER.call(lambda call: self._forward(call, ids, state, all_logits, hooks), self.watchdog)

    def export_state(self, state: State) -> dict[str, np.ndarray]:
        return self._call(lambda: self.room.ranks.gather(state, state.arrays()))

    def import_state(self, arrays: dict[str, np.ndarray], length: int) -> State:
        def read() -> State:
            own = self.room.ranks.scatter(arrays, length)
            return self.room.ranks.keep(State.from_arrays(self._local, DTYPES[self.dtype], own, length))

        return self._call(read)

    def experts_report(self) -> dict[str, Any]:
        return self.store.report()

    def parts_report(self) -> list[dict[str, Any]]:
        return self.room.report(self._formats)

    def dense_report(self) -> dict[str, Any]:
        if self.model is None:
            raise K3Error("the engine is closed")
        return self.model.layers.report()

    def ranks_report(self) -> list[dict[str, Any]]:
        return self.room.ranks.report()

    def runtime_report(self) -> dict[str, Any]:
        """Versions, whether products may use 10-bit mantissas, time in which the host waited for evaluations, with
        that in the C kernels too, MLX's own memory; `device` of the reports is where the dense parts run at the end,
        `first_device` where they began."""
        return {
            "mlx": version("mlx"),
            "tf32": os.environ.get(TF32) != "0",
            "first_device": self.room.first_kind,
            "evaluation_seconds": self.room.evaluation_seconds,
            "product_seconds": self.room.evaluation_seconds
            + (0.0 if self._native is None else self._native.spent.seconds),
            "mlx_active_bytes": mx.get_active_memory(),
            "mlx_peak_bytes": mx.get_peak_memory(),
        }

    def close(self) -> None:
        def drop(call: Call) -> None:
            if self.model is not None:
                self.model.close()
            self.model = None
            mx.clear_cache()

        self.room.ranks.close()
        OWNER.call(drop, self.watchdog)
        self.store.close()

    def with_model(self, work: Callable[[MlxModel], T]) -> T:
        """`work(model)` by the thread that owns MLX, for whoever goes through a model by layers.

        Nothing is done again when it fails: what MLX raises comes as K3Error.
        """

        def run() -> T:
            if self.model is None:
                raise K3Error("the engine is closed")
            if self.room.ranks.part is not None:
                raise UsageError("dense weights are split over ranks: go through a session, or load without")
            self.room.begin()
            try:
                return work(self.model)
            except (K3Error, MemoryError):
                raise
            except (RuntimeError, ValueError) as error:
                raise K3Error(f"mlx on {self.room.kind}: {error}") from error
            finally:
                self._slots.give_back()

        result: T = self._call(run)
        return result

    def _call(self, work: Callable[[], Any]) -> Any:
        def run(call: Call) -> Any:
            with mx.stream(self.room.stream):
                return work()

        return OWNER.call(run, self.watchdog)

    def _forward(
        self, call: Call, ids: Sequence[int], state: State, all_logits: bool, hooks: Hooks
    ) -> tuple[np.ndarray, State]:
        """Steps until one succeeds, then its commit."""
        if self.model is None:
            raise K3Error("the engine is closed")
        self.watchdog.ids = hooks.fed
        hooks = _guarded(hooks, call)
        while True:
            logits, updates, failure = self._try(ids, state, all_logits, hooks)
            if failure is None:
                break
            try:
                self.room.recover(failure)
            except EndOfRun as error:
                raise _with_ids(str(error), hooks.fed) from None
        try:
            with mx.stream(self.room.stream), self.watchdog.watch("writing the caches", 120):
                after = self.room.ranks.keep(state.commit(updates, len(ids)))
        except Exception as error:  # what the caches hold now is not known
            raise _with_ids(f"writing the caches failed: {error}", hooks.fed) from None
        self._slots.give_back()
        return logits, after

    def _try(
        self, ids: Sequence[int], state: State, all_logits: bool, hooks: Hooks
    ) -> tuple[Any, Any, str | None]:
        """(logits, updates, None), or what went wrong, with every array of the step gone with this frame."""
        self.room.begin()
        try:
            assert self.model is not None
            with mx.stream(self.room.stream):
                self.room.ranks.begin(state, len(ids))
                return *self.model.step(ids, state, all_logits, hooks), None
        except _InCallback as error:
            raise error.cause from None
        except (K3Error, MemoryError):
            raise
        except Exception as error:
            log.debug("a step failed", exc_info=True)
            return None, None, f"{type(error).__name__}: {error}"

    def _slow_formats(self) -> list[str]:
        """Weight formats that have no fast path on this device, named before anyone wonders about the speed."""
        lines = []
        experts = self._formats.get("experts", "mxfp4")
        if experts not in ("mxfp4", "affine"):
            lines.append(f"routed experts are stored as {experts}: widened at every use")
        if self.room.kind == "cpu" and self.dtype == "bfloat16":
            lines.append(
                "bfloat16 on the CPU is many times slower than float32: --dtype float32 unless memory forbids"
            )
        return lines


class _InCallback(Exception):
    """Something that the caller's own function raised, which is no failure of the model."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def _with_ids(what: str, ids: Sequence[int]) -> EndOfRun:
    return EndOfRun(f"{what}. {len(ids)} ids fed so far are in {save_ids(ids)}")


def wire(nbytes: int) -> list[str]:
    """Keep the dense weights from being paged out, where the system lets us; a line if it does not."""
    limit = int(mx.device_info().get("max_recommended_working_set_size", 0))
    try:
        mx.set_wired_limit(min(nbytes, limit))
    except (RuntimeError, ValueError) as error:
        return [f"the weights are not wired ({error}): under memory pressure they may be paged out"]
    return []


def _parts(checkpoint: Checkpoint) -> set[str]:
    """The parts that a model of this configuration has."""
    config = checkpoint.config
    moe = [config.is_moe(layer) for layer in range(config.num_hidden_layers)]
    parts = {"attn_res_mix", "head", *config.layer_kinds}
    if any(moe):
        parts |= {"router", "experts", "shared_experts"}
    return parts if all(moe) else parts | {"dense_mlp"}


def _expert_format(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    layer = next(filter(config.is_moe, range(config.num_hidden_layers)), None)
    if checkpoint.mxfp4 or layer is None:
        return "mxfp4"
    if checkpoint.affine_experts:
        return "affine"
    stored = checkpoint.expert_tensors(layer, 0)["w1.weight"].dtype
    return {"BF16": "bfloat16", "F16": "float16"}.get(stored, "float32")


def usable_kernels(device: str, wanted: bool, must: bool) -> tuple[Kernels, list[str]]:
    """The launchers of a device, and lines on what its self-test has not let through.

    Raises ResourceError for such a kernel if it must be used.
    """
    if device == "cpu" or not wanted:
        return Kernels(None), []
    from k3mlx.kernels.mlx_maker import MlxMaker
    from k3mlx.selftest import gate

    verdict = gate(device)
    lines = [
        f"{stem}: plain operations instead of the kernel: {why}" for stem, why in verdict.disabled.items()
    ]
    if must and lines:
        raise ResourceError(
            f"K3_METAL=1 asks for Metal, but {'; '.join(verdict.disabled.values())}: see k3mlx selftest"
        )

    def note(line: str) -> None:
        if not any(reason in line for reason in made.disabled.values()):  # those have had their line
            log.warning("k3mlx: %s", line)

    made = Kernels(MlxMaker(device), verdict.threads, note)
    for stem, why in verdict.disabled.items():
        made.disable(stem, why, failed=False)
    return made, lines


def _guarded(hooks: Hooks, call: Call) -> Hooks:
    """The hooks, but a call that nobody waits for any more stops at its next layer, and what the caller's own
    function raises is not taken for a failure of the model."""

    def before_layer(layer: int) -> None:
        if call.abandoned:
            raise K3Error("interrupted")
        try:
            hooks.before_layer(layer)
        except K3Error:
            raise
        except Exception as error:
            raise _InCallback(error) from error

    return replace(hooks, before_layer=before_layer)
