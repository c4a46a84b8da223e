"""A way through the MLX model, a layer at a time. Imports mlx; the work is done by the thread that owns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.backend import Backend
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.model.backend import DTYPES, MlxBackend
from k3mlx.model.mla import Span
from k3mlx.model.model import MlxModel, Residual
from k3mlx.model.state import KdaState, LatentCache, LayerState, advance
from k3mlx.reference.model import Hooks

from .path import Stream, read_router_bias, what_runs


class MlxPath:
    """The model of an MLX backend."""

    def __init__(self, backend: Backend, checkpoint: Checkpoint) -> None:
        assert isinstance(backend, MlxBackend)
        self.config = backend.config
        self.dtype = backend.dtype
        self.name = f"mlx {self.dtype} on {backend.device}"
        self._backend = backend
        self._checkpoint = checkpoint
        self._empty = backend.new_state()

    def embed(self, ids: Sequence[int]) -> Residual:
        return self._backend.with_model(lambda model: _evaluated(model.embed(ids)))

    def state(self, layer: int) -> LayerState:
        return self._empty.layers[layer]

    def layer(
        self, layer: int, stream: Residual, state: LayerState, hooks: Hooks
    ) -> tuple[Residual, LayerState]:
        def work(model: MlxModel) -> tuple[Residual, LayerState]:
            span = Span(state, stream.partial.shape[0]) if isinstance(state, LatentCache) else None
            after, update = model.layer(layer, stream, state, hooks, span)
            mx.eval([update.windows, update.state] if isinstance(update, KdaState) else update)
            new = advance(state, update)
            if isinstance(new, LatentCache):
                mx.eval(new.buffer.rows)
            return _evaluated(after), new

        return self._backend.with_model(work)

    def head(self, stream: Residual, hooks: Hooks) -> NDArray:
        return self._backend.with_model(lambda model: np.array(model.head(stream, True, hooks)))

    def to_host(self, stream: Residual) -> Stream:
        def work(model: MlxModel) -> Stream:
            blocks = [] if stream.blocks is None else list(_host(stream.blocks))
            return blocks, _host(stream.partial)

        return self._backend.with_model(work)

    def from_host(self, stream: Stream) -> Residual:
        def work(model: MlxModel) -> Residual:
            blocks, partial = stream
            stacked = _array(np.stack(blocks), self.dtype) if blocks else None
            return _evaluated(Residual(stacked, _array(partial, self.dtype)))

        return self._backend.with_model(work)

    def router_bias(self, layer: int) -> NDArray:
        return read_router_bias(self._checkpoint, layer)

    def parts(self) -> list[dict[str, Any]]:
        return what_runs(self._backend.parts_report())

    def close(self) -> None:
        self._backend.close()
        self._checkpoint.close()


def _evaluated(residual: Residual) -> Residual:
    mx.eval([residual.partial] if residual.blocks is None else [residual.blocks, residual.partial])
    return residual


def _host(array: mx.array) -> NDArray:
    return np.array(array.astype(mx.float32))


def _array(host: NDArray, dtype: str) -> mx.array:
    return mx.array(host.astype(np.float32)).astype(DTYPES[dtype])
