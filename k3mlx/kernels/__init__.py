"""GPU kernels: texts, launch descriptions, dispatch with counters, and the plain MLX paths behind them.

Owns how a kernel is found, checked, launched and replaced; the texts are in `custom_kernels`, the rules of
the model in `k3mlx/model`. Importing this package does not import mlx; `plain` and `mlx_maker` do.

    from k3mlx.kernels import Kernels
    from k3mlx.kernels.mlx_maker import MlxMaker
    kernels = Kernels(MlxMaker())        # Metal or CUDA, whichever this mlx has
    kernels = Kernels(None)              # the same calls, always the plain paths
    y, windows, state = kernels.kda_step(q, k, v, z, b, gate, windows, state, taps, A_log, dt_bias, o_norm,
                                         lower_bound, eps, l2_eps)
    mixed, normed = kernels.attn_res_mix(blocks, partial, norm, query, eps, out_norm)
    ids, weights, flags = kernels.route_topk(x, gate, bias, k, scaling)
"""

from .dispatch import Counter, Kernels
from .launch import KERNELS, Launch, Maker, Spec, Unsupported
from .texts import kernel_text, kernels_folder

__all__ = [
    "KERNELS",
    "Counter",
    "Kernels",
    "Launch",
    "Maker",
    "Spec",
    "Unsupported",
    "kernel_text",
    "kernels_folder",
]
