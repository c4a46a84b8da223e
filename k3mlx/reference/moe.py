"""The latent mixture of experts: router, weighted sum over routed experts.

Owns routing and combination. Where an expert's weights come from is the caller's business; the
shared experts and the projections around the latent space are in `model.py`.
Source: model specification §2.6.2.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .ops import Array, sigmoid, situ_mlp

ExpertWeights = tuple[Array, Array, Array]  # w1 gate [F, L], w2 down [L, F], w3 up [F, L]
FetchExperts = Callable[[NDArray[np.intp]], Iterable[tuple[int, ExpertWeights]]]
Mix = Callable[[Array], Array]  # latent inputs [T, L] -> weighted sum of the experts' outputs [T, L]


class Experts(Protocol):
    """Where the routed experts of a model come from and who applies them."""

    def start(self, layer: int, x: Array, ids: NDArray[np.intp], weights: Array) -> Mix:
        """Prepare the experts ids [T, k] of a layer, chosen for the normed inputs x [T, D].

        The result must give what `mix_experts` gives, and is called once; of the latents it needs no more than that
        `np.asarray` makes an array of them.
        """


def route_topk(x: Array, gate: Array, bias: Array, k: int, scaling: float) -> tuple[NDArray[np.intp], Array]:
    """Choose k experts for each token and weigh them.

    x [T, D] the full-width normed input; gate [E, D]; bias [E] takes part in the choice only.
    Returns (ids [T, k] by falling biased score, equal scores by rising id; weights [T, k]).
    """
    return select_topk(x @ gate.T, bias, k, scaling)


def select_topk(logits: Array, bias: Array, k: int, scaling: float) -> tuple[NDArray[np.intp], Array]:
    """The part of `route_topk` after the product with the gate: logits [T, E]."""
    scores = sigmoid(logits)
    ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :k]
    chosen, kind = scores[np.arange(len(ids))[:, None], ids], logits.dtype.type
    return ids, chosen / (chosen.sum(axis=-1, keepdims=True) + kind(1e-20)) * kind(scaling)


def mix_experts(
    x: Array, ids: NDArray[np.intp], weights: Array, fetch: FetchExperts, beta: float, linear_beta: float
) -> Array:
    """Weighted sum of the chosen experts' outputs, in the latent space.

    x [T, L]; ids and weights [T, k] -> [T, L]. `fetch` yields (id, weights) once for each distinct id,
    rising; each is applied to all its tokens, so a token's sum is always in the order of expert ids.
    """
    out = np.zeros_like(x)
    for expert, (w1, w2, w3) in fetch(np.unique(ids)):
        tokens, slots = np.nonzero(ids == expert)
        out[tokens] += weights[tokens, slots, None] * situ_mlp(x[tokens], w1, w3, w2, beta, linear_beta)
    return out
