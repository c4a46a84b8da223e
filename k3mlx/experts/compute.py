"""Routed experts in numpy: decode from the slot, apply to an expert's tokens, sum in the order of ids.

Gives exactly the bits of `reference.moe.mix_experts`, whatever order the experts come in. Owns neither
routing nor reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import DTypeLike, NDArray

from k3mlx.checkpoint.mxfp4 import GROUP, decode
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.clock import Stopwatch
from k3mlx.config import ModelConfig
from k3mlx.errors import ModelFilesError
from k3mlx.reference.moe import Mix, route_topk
from k3mlx.reference.ops import Array, situ_mlp

from .request import Request
from .store import ExpertStore, Held

SUMMANDS_MAX = 256 << 20  # bytes of expert outputs kept apart until they can be summed in order

Router = tuple[Array, Array]  # gate [E, D], bias [E]
Matrices = tuple[Array, Array, Array]  # w1 gate [F, L], w2 down [L, F], w3 up [F, L]


class NumpyExperts:
    """Computes the mixture of a layer from a store; reads begin at `start`, beside what the caller does."""

    kernel = "numpy"  # for the report

    @property
    def product_seconds(self) -> float:
        """Time in decoding and multiplying so far."""
        return self._products.seconds

    def __init__(
        self,
        store: ExpertStore,
        config: ModelConfig,
        dtype: DTypeLike = np.float32,
        router: Callable[[int], Router | None] | None = None,
    ) -> None:
        self.store = store
        self._router = router  # of a layer, for looking ahead
        self._config = config
        self._dtype = np.dtype(dtype)
        self._products = Stopwatch()
        self._scratch: dict[str, Array] = {}  # decoded matrices, one expert's at a time

    def start(self, layer: int, x: Array, ids: NDArray[np.intp], weights: Array) -> Mix:
        """Begin to read the experts ids [T, k] of a layer; the result mixes them for a latent [T, L]."""
        size = ids.size * self._config.routed_expert_hidden_size * self._dtype.itemsize
        apart = size <= SUMMANDS_MAX
        self.store.routed(layer, ids)
        request = self.store.request(layer, sorted(set(ids.ravel().tolist())), in_order=not apart)
        self._look_ahead(layer, x)

        def mix(latent: Array) -> Array:
            return self.mix_requested(layer, latent, ids, weights, request, apart)

        return mix

    def mix_requested(
        self, layer: int, latent: Array, ids: NDArray[np.intp], weights: Array, request: Request, apart: bool
    ) -> Array:
        """The mixture of the requested experts for a latent [T, L]; of ids [T, k] others are left out."""
        with request:
            return self._mix(latent, ids, weights, layer, request, apart)

    def _mix(
        self, x: Array, ids: NDArray[np.intp], weights: Array, layer: int, request: Request, apart: bool
    ) -> Array:
        """The mixture for latents x [T, L]; `apart` experts come in any order, others in that of their ids."""
        x = np.asarray(x)
        outputs = self._outputs(x, ids, weights, layer, request)
        return _sum_apart(x, ids, outputs) if apart else _sum(x, outputs)

    def _look_ahead(self, layer: int, x: Array) -> None:
        """Ask the next layer's router about this layer's input x [T, D]."""
        following = layer + 1
        if self._router is None or following == self._config.num_hidden_layers or not self.store.streams:
            return
        router = self._router(following) if self.store.lookahead.wanted(layer, len(x)) else None
        if router is not None:
            ids, _ = route_topk(x, *router, self.store.lookahead.ranks, 1.0)
            self.store.guess(following, ids[0].tolist())

    def _outputs(
        self, x: Array, ids: NDArray[np.intp], weights: Array, layer: int, request: Request
    ) -> Iterator[Output]:
        """Each expert's weighted outputs [n, L] for its n tokens, and where they belong in ids."""
        beta, linear_beta = self._config.activation_situ_beta, self._config.activation_situ_linear_beta
        for group in request.groups():
            for held in group:
                tokens, slots = np.nonzero(ids == held.expert)
                with self._products:
                    w1, w2, w3 = self._matrices(held, layer)
                    output = situ_mlp(x[tokens], w1, w3, w2, beta, linear_beta)
                yield tokens, slots, weights[tokens, slots, None] * output

    def _matrices(self, held: Held, layer: int) -> Matrices:
        """The decoded matrices of a held expert, valid until the next is decoded."""
        try:
            w1, w2, w3 = (self._matrix(held.parts, name) for name in ("w1", "w2", "w3"))
        except ModelFilesError as error:
            path = held.placement.pieces[0].path
            raise ModelFilesError(f"{path}: layer {layer}, expert {held.expert}: {error}") from None
        return w1, w2, w3

    def _matrix(self, parts: dict[str, NDArray], name: str) -> Array:
        plain = parts.get(f"{name}.weight")
        if plain is not None:
            return Checkpoint.widen(plain, self._dtype)
        packed, scale = parts[f"{name}.weight_packed"], parts[f"{name}.weight_scale"]
        out = self._scratch.get(name)
        if out is None:
            shape = scale.shape[0], scale.shape[1] * GROUP
            out = self._scratch[name] = np.empty(shape, self._dtype)
        return decode(packed, scale, self._dtype, out)


Output = tuple[
    NDArray[np.intp], NDArray[np.intp], Array
]  # tokens [n], places in their rows of ids [n], [n, L]


def _sum(x: Array, outputs: Iterable[Output]) -> Array:
    """The sum over experts that come in the order of their ids."""
    out = np.zeros_like(x)
    for tokens, _, output in outputs:
        out[tokens] += output
    return out


def _sum_apart(x: Array, ids: NDArray[np.intp], outputs: Iterable[Output]) -> Array:
    """The same sum over experts that come in any order: each token's outputs are added by rising id."""
    rank = np.argsort(np.argsort(ids, axis=1), axis=1)  # of each chosen expert among its token's
    summands = np.zeros((ids.shape[1], *x.shape), x.dtype)  # of experts that are left out, nothing
    for tokens, slots, output in outputs:
        summands[rank[tokens, slots], tokens] = output
    out = np.zeros_like(x)
    for summand in summands:
        out += summand
    return out
