"""The routed experts of a layer: their request from the store, and what computes them just now.

Owns the way from a router's choice to the weighted sum on the host. Knows no router and no projections, so a rank
that has nothing but experts can use it. Products on streams are in `moe.py`, on numpy in `k3mlx.experts`.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.config import ModelConfig
from k3mlx.experts.compute import NumpyExperts
from k3mlx.experts.request import Request
from k3mlx.experts.store import ExpertStore

from .moe import keeps_apart
from .room import Room
from .slots import ExpertBytes


class RoutedExperts:
    """Computes the experts of `store` in a room. Used by the thread that owns MLX."""

    def __init__(self, store: ExpertStore, config: ModelConfig, room: Room) -> None:
        self._store = store
        self._config = config
        self._room = room
        self._bytes = ExpertBytes()
        self._numpy = NumpyExperts(store, config, np.float32)

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
                return self._numpy.mix_requested(
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
