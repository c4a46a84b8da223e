"""The routed experts of a layer: their request from the store, and what computes them just now.

Owns the way from a router's choice to the weighted sum on the host. Knows no router and no projections, so a rank
that has nothing but experts can use it. Products on streams are in `moe.py`, in C and numpy in `k3mlx.experts`.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.config import ModelConfig
from k3mlx.errors import UsageError
from k3mlx.experts.compute import NumpyExperts
from k3mlx.experts.native import NativeExperts, choose_kernels
from k3mlx.experts.request import Request
from k3mlx.experts.store import ExpertStore
from k3mlx.kernels.cpu import CpuKernels

from .moe import keeps_apart
from .room import Room
from .slots import ExpertBytes

KERNELS = ("auto", "native", "stream")


def choose_native(
    kernel: str, checkpoint: Checkpoint, threads: int | None
) -> tuple[CpuKernels | None, str | None]:
    """The C kernels for the routed experts if they are wanted, and a line about it if `auto` cannot have them.

    kernel: `native`, `stream` (CPU streams of MLX), or `auto`: native where it is built and has computed right on this
    machine just now. Raises UsageError for another name or a format that the C kernels are not given, ResourceError if
    `native` cannot be had.
    """
    if kernel not in KERNELS:
        raise UsageError(f"experts_kernel is {kernel!r}, expected one of {', '.join(KERNELS)} on mlx")
    if checkpoint.affine_experts:
        if kernel == "native":
            raise UsageError("experts_kernel native is not for experts stored as affine codes: use stream")
        return None, None
    kernels, why = choose_kernels(kernel, threads)
    return kernels, why and f"experts on CPU streams of mlx, many times slower than the C kernels: {why}"


def in_mlx_memory(native: CpuKernels | None, experts_device: str) -> bool:
    """Whether experts are read into memory of MLX, which computes them there, at first at least."""
    return native is None or experts_device == "gpu"


class RoutedExperts:
    """Computes the experts of `store` in a room. Used by the thread that owns MLX.

    Where the room has no streams for them, the host computes: by the C kernels, by numpy if there are none.
    """

    def __init__(
        self, store: ExpertStore, config: ModelConfig, room: Room, native: CpuKernels | None = None
    ) -> None:
        self._store = store
        self._config = config
        self._room = room
        self._bytes = ExpertBytes()
        self._host = (
            NumpyExperts(store, config, np.float32)
            if native is None
            else NativeExperts(store, config, native)
        )

    def request(self, layer: int, ids: NDArray[np.intp], experts: list[int]) -> Request:
        """Begin to read `experts`, in rising order, of those that a router chose: ids [T, k]."""
        self._store.routed(layer, ids)
        return self._store.request(layer, experts, in_order=not self._apart(ids))

    def mix(
        self,
        layer: int,
        latent: mx.array,
        ids: NDArray[np.intp],
        weights: NDArray[np.float32],
        request: Request,
    ) -> NDArray[np.float32]:
        """The weighted sum of the requested experts [T, L], in rising order of ids.

        latent [T, L] float32, evaluated; ids and weights [T, k], others than the requested left out.
        """
        config, room = self._config, self._room
        room.enter("experts")
        with np.errstate(all="ignore"):  # damaged weights are reported from the logits, once
            if room.experts is None:
                return self._host.mix_requested(
                    layer, np.array(latent), ids, weights, request, self._apart(ids)
                )
            products = ids.size * 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
            return room.experts.mix(
                latent, ids, weights, request, lambda held: self._bytes.matrices(layer, held),
                config.activation_situ_beta, config.activation_situ_linear_beta,
                lambda arrays: room.evaluate(f"layer {layer}: experts", arrays, room.deadline(products)),
            )  # fmt: skip

    def _apart(self, ids: NDArray[np.intp]) -> bool:
        return keeps_apart(ids, self._config.routed_expert_hidden_size)
