"""Block attention residuals: the depth mix that replaces `x + f(x)`.

Owns the mixing of frozen block vectors with the running partial sum. When a block is frozen and
when the sum restarts is decided in `model.py`.
"""

from collections.abc import Sequence

import numpy as np

from .ops import Array, softmax


def attn_res_mix(blocks: Sequence[Array], partial: Array, norm: Array, query: Array, eps: float) -> Array:
    """Average the frozen blocks and the partial sum with weights that each token computes itself.

    blocks: any number of [T, D], oldest first; partial [T, D]; norm [D]; query [D] -> [T, D].
    The raw vectors are averaged; normalisation enters the scores only. No 1/sqrt(D), no temperature.
    Without blocks the result is `partial` itself. Source: model specification §2.2.
    """
    if not blocks:
        return partial
    direction = norm * query  # [D]
    sources = np.stack([*blocks, partial], axis=1)  # [T, sources, D]
    mean_square = np.einsum("tsi,tsi->ts", sources, sources) / sources.shape[-1]
    scores = (sources @ direction) / np.sqrt(mean_square + partial.dtype.type(eps))  # [T, sources]
    weights = softmax(scores)
    return (weights[:, None, :] @ sources)[:, 0]  # [T, D]
