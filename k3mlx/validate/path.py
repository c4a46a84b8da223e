"""One way through a model, a layer at a time: which backend, device, dtype and kernels, and how it is opened.

Owns the choice of a path and the numpy one; MLX's is in `mlx_path.py`. A path keeps one dense layer in memory at
most, embedding and head in pieces, and no experts; a float64 one keeps single matrices. Compares nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from k3mlx.backend import NumpyBackend, make_backend
from k3mlx.checkpoint.hub import resolve
from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.checkpoint.names import layer_prefix
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.config import ModelConfig
from k3mlx.dense_native import choose_dense
from k3mlx.devices import choose
from k3mlx.errors import UsageError
from k3mlx.experts.native import make_experts
from k3mlx.experts.options import stream_options
from k3mlx.experts.store import ExpertStore
from k3mlx.needs import default_dtype
from k3mlx.on_disk import DiskLayers, DiskTensors
from k3mlx.reference.model import Hooks, ReferenceModel, Residual
from k3mlx.reference.state import LayerState
from k3mlx.reference.weights import load_outer

Stream = tuple[list[NDArray], NDArray]  # frozen blocks and running sum on the host, each [T, D]


@dataclass(frozen=True)
class PathSpec:
    """Which way: as the flags of the same names. kernels: `off` for MLX's own operations where kernels would run."""

    backend: str = "auto"
    device: str = "auto"
    dtype: str | None = None
    kernels: str = "on"
    experts_device: str = "cpu"
    experts_kernel: str = "auto"
    dense_kernel: str = "auto"
    cpu_threads: int | None = None
    model: str | None = None  # another folder of the same model, a conversion for instance


REFERENCE = PathSpec(backend="numpy", dtype="float64")


def parse_spec(text: str) -> PathSpec:
    """`numpy,dtype=float64`, `mlx,device=cpu,model=FOLDER`: a backend, and what else is not the default.

    Raises UsageError for a name that there is not.
    """
    backend, *rest = text.split(",")
    known = {field.name for field in fields(PathSpec)} - {"backend"}
    spec = PathSpec(backend=backend)
    for item in rest:
        name, _, value = item.partition("=")
        name = name.replace("-", "_")
        if name not in known or not value or (name == "cpu_threads" and not value.isdecimal()):
            raise UsageError(
                f"{item!r} says nothing of a path, expected NAME=VALUE with one of {sorted(known)}"
            )
        setting: Any = int(value) if name == "cpu_threads" else value
        spec = replace(spec, **{name: setting})
    if spec.kernels not in ("on", "off"):
        raise UsageError(f"kernels is {spec.kernels!r}, expected on or off")
    return spec


class Path(Protocol):
    """A model that is gone through by layers. Streams and states are the path's own arrays, `Any` to the caller."""

    config: ModelConfig
    dtype: str
    name: str  # backend, dtype, device

    def embed(self, ids: Sequence[int]) -> Any:
        """The stream before layer 0."""

    def state(self, layer: int) -> Any:
        """The state of a layer before the first token."""

    def layer(self, layer: int, stream: Any, state: Any, hooks: Hooks) -> tuple[Any, Any]:
        """One layer: the stream behind it, and the layer's new state."""

    def head(self, stream: Any, hooks: Hooks) -> NDArray:
        """Logits [T, V]."""

    def to_host(self, stream: Any) -> Stream:
        """A stream as numpy arrays."""

    def from_host(self, stream: Stream) -> Any:
        """A stream of another path, rounded to the dtype of this one."""

    def router_bias(self, layer: int) -> NDArray:
        """What a layer's router adds to the scores of its experts [E] before they are compared."""

    def parts(self) -> list[dict[str, Any]]:
        """What runs where: part, device, kernel, format; [] where it is numpy throughout."""

    def close(self) -> None:
        """Release files and memory."""


class NumpyPath:
    """A `ReferenceModel`, by itself with its matrices on disk or inside a backend."""

    def __init__(
        self, model: ReferenceModel, checkpoint: Checkpoint, owner: NumpyBackend | ExpertStore
    ) -> None:
        self.config = model.config
        self.dtype = str(model.dtype)
        self.name = f"numpy {self.dtype}"
        self._model = model
        self._empty = model.new_state()
        self._checkpoint = checkpoint
        self._owner = owner

    def embed(self, ids: Sequence[int]) -> Residual:
        return self._model.embed(ids)

    def state(self, layer: int) -> LayerState:
        return self._empty.layers[layer]

    def layer(
        self, layer: int, stream: Residual, state: LayerState, hooks: Hooks
    ) -> tuple[Residual, LayerState]:
        with np.errstate(all="ignore"):  # what is not finite is found by the comparison
            return self._model.layer(layer, stream, state, hooks)

    def head(self, stream: Residual, hooks: Hooks) -> NDArray:
        with np.errstate(all="ignore"):
            return self._model.head(stream, True, hooks)

    def to_host(self, stream: Residual) -> Stream:
        return list(stream.blocks), stream.partial

    def from_host(self, stream: Stream) -> Residual:
        blocks, partial = stream
        kind = self._model.dtype
        return Residual(tuple(block.astype(kind) for block in blocks), partial.astype(kind))

    def router_bias(self, layer: int) -> NDArray:
        return read_router_bias(self._checkpoint, layer)

    def parts(self) -> list[dict[str, Any]]:
        return what_runs(self._owner.parts_report()) if isinstance(self._owner, NumpyBackend) else []

    def close(self) -> None:
        self._owner.close()
        self._checkpoint.close()


def what_runs(report: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An engine's report of its parts without the counts, which are of whole passes."""
    return [{key: part[key] for key in ("part", "device", "kernel", "format")} for part in report]


def open_path(spec: PathSpec, model: str | None, io_threads: int | None = None) -> tuple[Path, list[str]]:
    """Open a path through a model (a folder, a repo id, or None for the small one), and lines about it.

    Raises UsageError, ModelFilesError or ResourceError.
    """
    choice = choose(spec.backend, spec.device)
    if spec.kernels == "off":
        choice = replace(choice, kernels=False, must=False)
    streaming = stream_options(io_threads, lookahead="off", warm_start="off")
    checkpoint = open_checkpoint(resolve(spec.model or model))
    try:
        if choice.backend == "numpy" and spec.dtype == "float64":
            store = ExpertStore(checkpoint, 0, streaming)
            kind = np.dtype(np.float64)
            experts, _ = make_experts(
                spec.experts_kernel, store, checkpoint.config, kind, None, spec.cpu_threads
            )
            outer = load_outer(DiskTensors(checkpoint), kind)
            disk_model = ReferenceModel(checkpoint, experts, kind, DiskLayers(checkpoint, kind), outer)
            return NumpyPath(disk_model, checkpoint, store), []
        dtype = spec.dtype or default_dtype(choice)
        width = checkpoint.config.hidden_size
        dense, note = choose_dense(spec.dense_kernel, choice.backend, dtype, width, spec.cpu_threads)
        backend = make_backend(
            choice, checkpoint, dtype, None, spec.experts_device, spec.experts_kernel,
            spec.cpu_threads, streaming, thin=True, dense=dense,
        )  # fmt: skip
    except BaseException:
        checkpoint.close()
        raise
    lines = [*backend.notes, *([] if note is None else [note])]
    if isinstance(backend, NumpyBackend):
        return NumpyPath(backend.model, checkpoint, backend), lines
    from .mlx_path import MlxPath

    return MlxPath(backend, checkpoint), lines


def read_router_bias(checkpoint: Checkpoint, layer: int) -> NDArray:
    return checkpoint.load(f"{layer_prefix(layer)}block_sparse_moe.gate.e_score_correction_bias", np.float64)
