"""The MLX backend of the engine: one loaded model on Metal, CUDA or the CPU device of MLX.

Owns loading, the redo of a failed step and the commit of a good one. All of it happens in the thread that
owns MLX (`owner.py`); this object may be called from any. `MLX_ENABLE_TF32=0` is set before mlx is imported,
by `k3mlx.devices`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.devices import TF32
from k3mlx.errors import K3Error, UsageError
from k3mlx.experts.options import StreamOptions
from k3mlx.experts.store import ExpertStore
from k3mlx.kernels import Kernels
from k3mlx.kernels.cpu import default_threads
from k3mlx.reference.model import Hooks
from k3mlx.watchdog import Watchdog, save_ids

from .model import MlxModel
from .moe import ExpertStreams
from .owner import OWNER, Call
from .room import EndOfRun, Room, log
from .slots import MlxSlots
from .state import State
from .weights import Loader

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
CACHE_BYTES = 1 << 30  # freed buffers that MLX may keep


class MlxBackend:
    """The model in MLX.

    device: `metal`, `cuda` or `cpu`, known to be there. dtype: of the activations and the dense weights.
    experts_device: `cpu` for streams of the CPU, `gpu` for MLX's own matmul on the GPU. threads: CPU streams.
    kernels: whether the kernels of this package are used on the GPU.
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
        experts_device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise UsageError(f"dtype is {dtype!r}, expected bfloat16 or float32 on the mlx backend")
        self.config = checkpoint.config
        self.dtype = dtype
        self.store = ExpertStore(checkpoint, expert_cache, streaming, MlxSlots())
        threads = threads or default_threads()
        self.watchdog = Watchdog()
        self._expert_format = _expert_format(checkpoint)

        def build(call: Call) -> tuple[Room, MlxModel]:
            mx.set_cache_limit(CACHE_BYTES)
            on_gpu = experts_device == "gpu" and device != "cpu"
            streams = ExpertStreams(
                mx.gpu if on_gpu else mx.cpu, 1 if on_gpu else threads, group=max(16, threads)
            )
            room = Room(
                device, _kernels(device, kernels), streams, device if on_gpu else "cpu", self.watchdog
            )
            loader = Loader(checkpoint, DTYPES[dtype], in_place=device != "cuda")
            with mx.stream(room.stream):
                return room, MlxModel(loader, self.store, room)

        self.room, self.model = OWNER.call(build, self.watchdog)

    @property
    def device(self) -> str:
        """Where the dense parts run now: `metal`, `cuda` or `cpu`."""
        return self.room.kind

    def new_state(self) -> State:
        return self._call(lambda: State.empty(self.config, DTYPES[self.dtype]))

    def forward(
        self, ids: Sequence[int], state: State, all_logits: bool, hooks: Hooks
    ) -> tuple[np.ndarray, State]:
        return OWNER.call(lambda call: self._forward(call, ids, state, all_logits, hooks), self.watchdog)

    def export_state(self, state: State) -> dict[str, np.ndarray]:
        return self._call(state.arrays)

    def import_state(self, arrays: dict[str, np.ndarray], length: int) -> State:
        return self._call(lambda: State.from_arrays(self.config, DTYPES[self.dtype], arrays, length))

    def experts_report(self) -> dict[str, Any]:
        return self.store.report()

    def parts_report(self) -> list[dict[str, Any]]:
        return self.room.report(self._formats())

    def dense_report(self) -> dict[str, Any]:
        return {"bytes_read": 0, "read_seconds": 0.0, "wait_seconds": 0.0}  # every layer stays in memory

    def runtime_report(self) -> dict[str, Any]:
        """Versions, whether products may use 10-bit mantissas, MLX's own memory; `device` of the reports is
        where the dense parts run at the end, `first_device` where they began."""
        return {
            "mlx": version("mlx"),
            "tf32": os.environ.get(TF32) != "0",
            "first_device": self.room.first_kind,
            "mlx_active_bytes": mx.get_active_memory(),
            "mlx_peak_bytes": mx.get_peak_memory(),
        }

    def close(self) -> None:
        def drop(call: Call) -> None:
            if hasattr(self, "model"):
                del self.model
            mx.clear_cache()

        OWNER.call(drop, self.watchdog)
        self.store.close()

    def _call(self, work: Callable[[], Any]) -> Any:
        def run(call: Call) -> Any:
            with mx.stream(self.room.stream):
                return work()

        return OWNER.call(run, self.watchdog)

    def _forward(
        self, call: Call, ids: Sequence[int], state: State, all_logits: bool, hooks: Hooks
    ) -> tuple[np.ndarray, State]:
        """Steps until one succeeds, then its commit."""
        self.watchdog.ids = hooks.fed
        hooks = _stoppable(hooks, call)
        while True:
            logits, updates, failure = self._try(ids, state, all_logits, hooks)
            if failure is None:
                break
            try:
                self.room.recover(failure)
            except EndOfRun as error:
                raise EndOfRun(
                    f"{error}. {len(hooks.fed)} ids fed so far are in {save_ids(hooks.fed)}"
                ) from None
        with mx.stream(self.room.stream), self.watchdog.watch("writing the caches", 120):
            return logits, state.commit(updates, len(ids))

    def _try(
        self, ids: Sequence[int], state: State, all_logits: bool, hooks: Hooks
    ) -> tuple[Any, Any, str | None]:
        """(logits, updates, None), or what went wrong, with every array of the step gone with this frame."""
        self.room.begin()
        try:
            with mx.stream(self.room.stream):
                return *self.model.step(ids, state, all_logits, hooks), None
        except K3Error:
            raise
        except Exception as error:
            log.debug("a step failed", exc_info=True)
            return None, None, f"{type(error).__name__}: {error}"

    def _formats(self) -> dict[str, str]:
        """Weight formats of the parts that this model has."""
        config = self.config
        layers = range(config.num_hidden_layers)
        formats = self.model.formats() | {"experts": self._expert_format}
        absent = set()
        if "kda" not in config.layer_kinds:
            absent.add("kda")
        if "mla" not in config.layer_kinds:
            absent.add("mla")
        if all(map(config.is_moe, layers)):
            absent.add("dense_mlp")
        if not any(map(config.is_moe, layers)):
            absent |= {"router", "experts", "shared_experts"}
        return {part: form for part, form in formats.items() if part not in absent}


def _expert_format(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    layer = next(filter(config.is_moe, range(config.num_hidden_layers)), None)
    if checkpoint.mxfp4 or layer is None:
        return "mxfp4"
    if checkpoint.affine_experts:
        return "affine"
    stored = checkpoint.expert_tensors(layer, 0)["w1.weight"].dtype
    return {"BF16": "bfloat16", "F16": "float16"}.get(stored, "float32")


def _kernels(device: str, wanted: bool) -> Kernels:
    if device == "cpu" or not wanted:
        return Kernels(None)
    from k3mlx.kernels.mlx_maker import MlxMaker

    return Kernels(MlxMaker(device), note=lambda line: log.warning("k3mlx: %s", line))


def _stoppable(hooks: Hooks, call: Call) -> Hooks:
    """The hooks, but a call that nobody waits for any more stops at its next layer."""

    def before_layer(layer: int) -> None:
        if call.abandoned:
            raise K3Error("interrupted")
        hooks.before_layer(layer)

    return Hooks(before_layer, hooks.probe, hooks.clock, hooks.fed)
