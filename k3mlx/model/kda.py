"""Kimi delta attention in MLX: the projections around the recurrence.

What lies between them, convolution to gated output, is one call of the kernel layer, which has plain MLX
operations behind it (`k3mlx.kernels`). Source: model specification §2.3.
"""

from __future__ import annotations

import mlx.core as mx

from k3mlx.config import ModelConfig
from k3mlx.kernels import Kernels
from k3mlx.stages import Probe, no_probe

from .ops import Weights, linear
from .state import KdaState


def kda(
    x: mx.array, w: Weights, old: KdaState, config: ModelConfig, kernels: Kernels, probe: Probe
) -> tuple[mx.array, KdaState]:
    """KDA on the normed input x [T, D] -> [T, D] and the layer's new state; the old one is left untouched."""
    q, k, v = (probe(stream, linear(x, w[f"{stream}_proj"])) for stream in "qkv")
    z = probe("z", linear(linear(x, w["f_a_proj"]), w["f_b_proj"]))  # no activation between the two factors
    b = probe("b", linear(x, w["b_proj"]))
    gate = probe("gate", linear(x, w["g_proj"]))
    y, windows, state = kernels.kda_step(
        q[None], k[None], v[None], z[None], b[None], gate[None], old.windows, old.state,
        w["taps"], w["A_log"], w["dt_bias"], w["o_norm"],
        config.gate_lower_bound, config.rms_norm_eps, config.l2_norm_eps,
        no_probe if probe is no_probe else lambda stage, array: probe(stage, array[0])[None],
    )  # fmt: skip
    return linear(y[0], w["o_proj"]), KdaState(windows, state)
