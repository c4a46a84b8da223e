"""The routed experts of a layer in C, from a store: takes the place of `NumpyExperts` in float32.

Owns the hand-over of held experts to `CpuKernels.experts_mix`; reads, order of sums and looking ahead are
those of its base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from k3mlx.config import ModelConfig
from k3mlx.errors import ModelFilesError
from k3mlx.experts.compute import NumpyExperts, Output, Router
from k3mlx.experts.request import Request
from k3mlx.experts.store import ExpertStore, Held
from k3mlx.reference.ops import Array

from .cpu import CpuKernels, Expert
from .cpu_matrix import Matrix

_AT_ONCE = 16  # experts of one call at most: those whose bytes are there


class NativeExperts(NumpyExperts):
    """Computes the mixture of a layer with the C kernels, without decoding an expert into memory.

    The bits are those of one `experts_mix` over all experts by rising id, in whatever order they arrive.
    """

    def __init__(
        self,
        store: ExpertStore,
        config: ModelConfig,
        kernels: CpuKernels,
        router: Callable[[int], Router | None] | None = None,
    ) -> None:
        super().__init__(store, config, np.float32, router)
        self.kernels = kernels

    def _outputs(
        self, x: Array, ids: NDArray[np.intp], weights: Array, layer: int, request: Request
    ) -> Iterator[Output]:
        config = self._config
        for group in request.groups(_AT_ONCE):
            places = [np.nonzero(ids == held.expert) for held in group]
            ends = np.cumsum([len(tokens) for tokens, _ in places])
            out = np.zeros((int(ends[-1]), x.shape[1]), np.float32)
            rows = np.split(np.arange(len(out)), ends[:-1])
            try:
                self.kernels.experts_mix(
                    x,
                    [_stored(held.parts) for held in group],
                    [tokens for tokens, _ in places],
                    [weights[tokens, slots] for tokens, slots in places],
                    config.activation_situ_beta,
                    config.activation_situ_linear_beta,
                    out,
                    rows,
                )
            except ModelFilesError:
                self._name_the_damaged(group, layer)
                raise
            for (tokens, slots), own in zip(places, rows, strict=True):
                yield tokens, slots, out[own]

    def _name_the_damaged(self, group: list[Held], layer: int) -> None:
        """Raise the error that decoding gives, which names file, layer and expert."""
        for held in group:
            self._matrices(held, layer)


def _stored(parts: dict[str, NDArray]) -> Expert:
    """An expert's parts as `experts_mix` takes them: MXFP4 as stored, or plain floats."""
    names = ("w1", "w2", "w3")
    if "w1.weight" in parts:
        w1, w2, w3 = (Matrix.dense(parts[f"{name}.weight"]) for name in names)
        return w1, w2, w3
    return tuple(parts[f"{name}.weight_{kind}"] for name in names for kind in ("packed", "scale"))
