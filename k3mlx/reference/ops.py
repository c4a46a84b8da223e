"""Elementwise functions and norms shared by the parts of the reference model.

Every function computes in the dtype of its first argument (float32 or float64). No weights, no state.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from k3mlx.stages import Probe, no_probe

Array = NDArray[np.floating]


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow at either end."""
    # tanh saturates instead of overflowing: sigma(x) = (1 + tanh(x / 2)) / 2
    return 0.5 * np.tanh(0.5 * x) + 0.5


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def situ(gate: Array, up: Array, beta: float, linear_beta: float) -> Array:
    """Bounded gated activation of every MLP; |result| <= beta * linear_beta.

    beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), same shapes.
    Source: model specification §2.6.1.
    """
    return (beta * np.tanh(gate / beta) * sigmoid(gate)) * (linear_beta * np.tanh(up / linear_beta))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis."""
    mean_square = np.einsum("...i,...i->...", x, x)[..., None] / x.shape[-1]
    return x / np.sqrt(mean_square + x.dtype.type(eps)) * weight


def l2_norm(x: Array, eps: float) -> Array:
    """x / sqrt(sum(x^2) + eps) over the last axis; eps is added to the sum, not to the mean."""
    return x / np.sqrt(np.einsum("...i,...i->...", x, x)[..., None] + x.dtype.type(eps))


def softmax(scores: Array) -> Array:
    """Softmax over the last axis; entries of -inf get weight 0. A row must hold one finite score."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def products(x: Array, weights: Sequence[Array]) -> list[Array]:
    """x w^T for several weights of the same input: x [T, in], each w [out, in] -> [T, out]."""
    return [x @ w.T for w in weights]


def situ_mlp(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    beta: float,
    linear_beta: float,
    probe: Probe = no_probe,
) -> Array:
    """SiTU(x W_gate^T, x W_up^T) W_down^T for the dense, shared and routed MLPs alike.

    x [T, in], w_gate and w_up [inner, in], w_down [out, inner] -> [T, out].
    """
    gate, up = probe("gate", x @ w_gate.T), probe("up", x @ w_up.T)
    return probe("activated", situ(gate, up, beta, linear_beta)) @ w_down.T
