"""What an engine needs of a backend, and the numpy one.

A backend owns weights, experts and the forward pass; it knows nothing of sessions or text. Its states
are values: `forward` returns a new one and leaves the one it was given usable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .blas import BlasThreads
from .checkpoint.snapshot import Checkpoint
from .config import ModelConfig
from .dense import LayerRing, stored_sizes
from .dense_native import formats
from .dense_numpy import DenseReader
from .devices import Choice
from .errors import ResourceError, UsageError
from .experts.native import make_experts
from .experts.options import StreamOptions
from .experts.store import ExpertStore
from .governor import MemoryPlan
from .kernels.cpu import CpuKernels
from .kernels.cpu_parts import CpuParts
from .needs import backend_needs, default_dtype, mlx_cache_limit
from .on_disk import DiskTensors
from .reference.model import Hooks, ReferenceModel
from .reference.state import State
from .reference.weights import load_layer, load_outer

if TYPE_CHECKING:
    from .ranks.lead import Lead


class Backend(Protocol):
    """One loaded model on one kind of hardware."""

    name: str
    dtype: str
    config: ModelConfig
    store: ExpertStore
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

    def dense_report(self) -> dict[str, Any]:
        """What reading dense weights at each use has cost: bytes_read, read_seconds, wait_seconds."""

    def runtime_report(self) -> dict[str, Any]:
        """What else there is to say of the libraries that ran: versions, switches, their own memory."""

    def ranks_report(self) -> list[dict[str, Any]]:
        """What each of several processes has read and exchanged; empty for one alone."""

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
        resident: Collection[int] | None = None,
        experts_kernel: str = "auto",
        cpu_threads: int | None = None,
        thin: bool = False,
        dense: CpuKernels | None = None,
    ) -> None:
        """resident: the layers whose dense weights stay in memory, all if None; others are read at each use.
        thin: embedding and head stay on disk, and no layer is read ahead. dense: kernels that multiply with dense
        weights as they are stored; without them these are widened to `dtype` for numpy."""
        if dtype not in ("float32", "float64"):
            raise UsageError(f"dtype is {dtype!r}, expected float32 or float64 on the numpy backend")
        self.config = checkpoint.config
        self.dtype = dtype
        self.store = ExpertStore(checkpoint, expert_cache, streaming)
        item, sizes = np.dtype(dtype), stored_sizes(checkpoint)
        kept = set(range(len(sizes)) if resident is None else resident)
        streamed = [n for n in range(len(sizes)) if n not in kept]
        io, direct = self.store.options.io_threads, self.store.files.direct
        self._reader = DenseReader(checkpoint, io, direct, item, streamed, 1 if thin else 2, dense)
        self._ring = LayerRing(
            lambda layer: lambda: load_layer(self._reader.layer(layer), layer, item),
            sizes,
            kept,
            self._reader.drop,
            ahead=not thin,
        )
        experts, note = make_experts(experts_kernel, self.store, self.config, item, self._router, cpu_threads)
        self.notes = () if note is None else (note,)
        outer = load_outer(DiskTensors(checkpoint, dense) if thin else self._reader.outer(), item)
        if not streamed:
            self._reader.close()
        parts = None if dense is None else CpuParts(dense)
        self.model = ReferenceModel(checkpoint, experts, item, self._ring, outer, parts, bool(streamed))
        stored = {} if dense is None else formats(checkpoint)
        self._formats = dict.fromkeys(self._parts_per_pass(), dtype) | stored
        self._formats["experts"] = "mxfp4" if checkpoint.mxfp4 else dtype
        self._kernels = dict.fromkeys(self._formats, "numpy")
        if dense is not None:
            self._kernels |= dict.fromkeys([*stored, "attn_res_mix"], dense.describe())
        self._kernels["experts"] = experts.kernel
        self._experts, self._dense = experts, dense
        self._calls: Counter[str] = Counter()
        self._blas = BlasThreads(self.config.hidden_size, dense is not None)

    def new_state(self) -> State:
        return self.model.new_state()

    def forward(
        self, ids: Sequence[int], state: State, all_logits: bool, hooks: Hooks
    ) -> tuple[np.ndarray, State]:
        self._calls.update(self._parts_per_pass())
        self._blas.for_pass(len(ids))
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
                "kernel": self._kernels[part],
                "format": self._formats[part],
                "calls": self._calls[part],
                "failures": 0,
                "fallbacks": 0,
            }
            for part in self._parts_per_pass()
        ]

    def runtime_report(self) -> dict[str, Any]:
        """Versions; time in products where the dense ones are not numpy's own, which nobody can tell from the rest."""
        found: dict[str, Any] = {"numpy": np.__version__}
        if self._dense is not None:
            own = self.model.parts.stopwatch.seconds + self._experts.product_seconds
            found["product_seconds"] = own + self._dense.spent.seconds
        return found

    def dense_report(self) -> dict[str, Any]:
        return self._ring.report()

    def ranks_report(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        self.store.close()
        self._ring.close()
        self._reader.close()
        self._blas.restore()

    def _router(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Gate and bias of a layer whose weights are in memory, for looking ahead."""
        weights = self._ring.resident(layer)
        if weights is None:
            return None
        return weights.ffn["gate"], weights.ffn["gate.e_score_correction_bias"]

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
    experts_kernel: str = "auto",
    cpu_threads: int | None = None,
    streaming: StreamOptions | None = None,
    plan: MemoryPlan | None = None,
    thin: bool = False,
    ranks: Lead | None = None,
    dense: CpuKernels | None = None,
) -> Backend:
    """The backend that was chosen, with the model loaded. dtype None is the backend's own choice.

    With a plan its cache and its resident layers are used, whatever expert_cache says. thin: as little memory as
    can be: dense layers are read one at a time where the backend can (else all stay), embedding and head in
    pieces, and no expert is kept. dense: kernels for dense weights as stored, on numpy (`dense_native.choose_dense`).
    Raises UsageError for a dtype that it does not compute in, ResourceError for experts on a GPU without one.
    """
    if experts_device not in ("cpu", "gpu"):
        raise UsageError(f"experts_device is {experts_device!r}, expected cpu or gpu")
    if cpu_threads is not None and cpu_threads < 1:
        raise UsageError(f"cpu_threads is {cpu_threads}, expected at least 1")
    if experts_device == "gpu" and choice.device == "cpu":
        raise ResourceError("experts_device gpu asks for a GPU, but this run has none: see --device")
    dtype = dtype or default_dtype(choice)
    resident = None if plan is None else plan.resident
    if plan is not None:
        expert_cache = plan.cache
    if thin:
        expert_cache = 0
        resident = None if backend_needs(choice, checkpoint, dtype).ring is None else ()
    if choice.backend == "numpy":
        if checkpoint.affine_experts:
            raise ResourceError("the experts are stored as affine codes, which only the mlx backend computes")
        made: Backend = NumpyBackend(
            checkpoint, dtype, expert_cache, streaming, resident, experts_kernel, cpu_threads, thin, dense
        )  # fmt: skip
    else:
        from .model.backend import MlxBackend

        made = MlxBackend(
            checkpoint, dtype, expert_cache, streaming,
            device=choice.device, kernels=choice.kernels, must=choice.must,
            experts_device=experts_device, experts_kernel=experts_kernel, threads=cpu_threads,
            cache_bytes=mlx_cache_limit(0 if plan is None else plan.memory) if plan or thin else None,
            resident=resident, thin=thin, ranks=ranks,
        )  # fmt: skip
    made.notes = (*choice.notes, *made.notes)
    return made
