"""What an engine needs of a backend, and the numpy one.

A backend owns weights, experts and the forward pass; it knows nothing of sessions or text. Its states
are values: `forward` returns a new one and leaves the one it was given usable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .checkpoint.snapshot import Checkpoint
from .config import ModelConfig
from .devices import Choice
from .errors import ResourceError, UsageError
from .experts.compute import NumpyExperts
from .experts.options import StreamOptions
from .experts.store import ExpertStore
from .reference.model import Hooks, ReferenceModel
from .reference.state import State


class Backend(Protocol):
    """One loaded model on one kind of hardware."""

    name: str
    dtype: str
    config: ModelConfig
    notes: tuple[str, ...]  # lines about what it runs on, for whoever started it

    @property
    def device(self) -> str:
        """Where the dense parts run now: `cpu`, `metal` or `cuda`."""

    def new_state(self) -> Any:
        """The state before the first token."""

    def forward(
        self, ids: Sequence[int], state: Any, all_logits: bool, hooks: Hooks
    ) -> tuple[np.ndarray, Any]:
        """Run ids after `state`: (logits [V] or [T, V], the next state)."""

    def export_state(self, state: Any) -> dict[str, np.ndarray]:
        """The state as named arrays, for a file."""

    def import_state(self, arrays: dict[str, np.ndarray], length: int) -> Any:
        """The state after `length` tokens that `export_state` gave. Raises UsageError if it does not fit."""

    def experts_report(self) -> dict[str, Any]:
        """The `experts` object of the report."""

    def parts_report(self) -> list[dict[str, Any]]:
        """What ran where: part, device, kernel, format, calls, failures, fallbacks."""

    def runtime_report(self) -> dict[str, Any]:
        """What else there is to say of the libraries that ran: versions, switches, their own memory."""

    def close(self) -> None:
        """Release files and memory."""


class NumpyBackend:
    """The reference model as an engine: float32 for use, float64 as the oracle."""

    name = "numpy"
    device = "cpu"
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        expert_cache: int | None,
        streaming: StreamOptions | None = None,
    ) -> None:
        if dtype not in ("float32", "float64"):
            raise UsageError(f"dtype is {dtype!r}, expected float32 or float64 on the numpy backend")
        self.config = checkpoint.config
        self.dtype = dtype
        self.store = ExpertStore(checkpoint, expert_cache, streaming)
        self.model = ReferenceModel(
            checkpoint, NumpyExperts(self.store, self.config, np.dtype(dtype)), np.dtype(dtype)
        )
        self._expert_format = "mxfp4" if checkpoint.mxfp4 else dtype
        self._calls: Counter[str] = Counter()

    def new_state(self) -> State:
        return self.model.new_state()

    def forward(
        self, ids: Sequence[int], state: State, all_logits: bool, hooks: Hooks
    ) -> tuple[np.ndarray, State]:
        self._calls.update(self._parts_per_pass())
        with np.errstate(all="ignore"):  # damaged weights are reported from the logits, once
            return self.model.forward(ids, state, all_logits, hooks)

    def export_state(self, state: State) -> dict[str, np.ndarray]:
        return state.arrays()

    def import_state(self, arrays: dict[str, np.ndarray], length: int) -> State:
        return State.from_arrays(self.config, np.dtype(self.dtype), arrays, length)

    def experts_report(self) -> dict[str, Any]:
        return self.store.report()

    def parts_report(self) -> list[dict[str, Any]]:
        return [
            {
                "part": part,
                "device": self.device,
                "kernel": "numpy",
                "format": self._expert_format if part == "experts" else self.dtype,
                "calls": self._calls[part],
                "failures": 0,
                "fallbacks": 0,
            }
            for part in self._parts_per_pass()
        ]

    def runtime_report(self) -> dict[str, Any]:
        return {"numpy": np.__version__}

    def close(self) -> None:
        self.store.close()

    def _parts_per_pass(self) -> dict[str, int]:
        """How often each part runs in one forward pass."""
        kinds, layers = Counter(self.config.layer_kinds), self.config.num_hidden_layers
        moe = sum(map(self.config.is_moe, range(layers)))
        return {
            "kda": kinds["kda"],
            "mla": kinds["mla"],
            "attn_res_mix": 2 * layers + 1,
            "dense_mlp": layers - moe,
            "router": moe,
            "experts": moe,
            "shared_experts": moe,
            "head": 1,
        }


def make_backend(
    choice: Choice,
    checkpoint: Checkpoint,
    dtype: str | None,
    expert_cache: int | None,
    experts_device: str = "cpu",
    cpu_threads: int | None = None,
    streaming: StreamOptions | None = None,
) -> Backend:
    """The backend that was chosen, with the model loaded. dtype None is the backend's own choice.

    Raises UsageError for a dtype that it does not compute in, ResourceError for experts on a GPU without one.
    """
    if experts_device not in ("cpu", "gpu"):
        raise UsageError(f"experts_device is {experts_device!r}, expected cpu or gpu")
    if cpu_threads is not None and cpu_threads < 1:
        raise UsageError(f"cpu_threads is {cpu_threads}, expected at least 1")
    if experts_device == "gpu" and choice.device == "cpu":
        raise ResourceError("experts_device gpu asks for a GPU, but this run has none: see --device")
    if choice.backend == "numpy":
        made: Backend = NumpyBackend(checkpoint, dtype or "float32", expert_cache, streaming)
    else:
        from .model.backend import MlxBackend

        dtype = dtype or ("float32" if choice.device == "cpu" else "bfloat16")
        made = MlxBackend(
            checkpoint, dtype, expert_cache, streaming,
            device=choice.device, kernels=choice.kernels, experts_device=experts_device, threads=cpu_threads,
        )  # fmt: skip
    made.notes = choice.notes
    return made
