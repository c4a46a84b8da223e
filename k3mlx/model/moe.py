"""The latent mixture of experts in MLX: which experts compute where, and the sum of what they give.

Owns the products of routed experts on a pool of CPU streams, or on the GPU, and their combination in rising
order of expert ids, in float32. Where an expert's bytes come from is the store's business; the router and
the projections around the latent space are in `model.py`. Source: model specification §2.6.2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.experts.request import Request
from k3mlx.experts.store import Held

from .ops import Quantized, situ_mlp
from .slots import ExpertMatrices

SUMMANDS_MAX = 256 << 20  # bytes of expert outputs kept apart until they can be summed in order
Evaluate = Callable[[list[mx.array]], None]  # waits for arrays, under a deadline
Matrices = Callable[[Held], ExpertMatrices]
Outputs = dict[int, NDArray[np.float32]]  # by expert: [its tokens, L]


class ExpertStreams:
    """Computes routed experts on streams of one device, `group` experts at a time at most.

    On the CPU each stream is a thread and the activations are float32; on the GPU there is one stream and
    the activations keep the dtype they come in. Made by the thread that owns MLX.
    """

    def __init__(self, device: Any, count: int, group: int) -> None:
        self.streams = _streams(device, count)
        self._on_cpu = device == mx.cpu
        self.group = group

    def mix(
        self,
        x: mx.array,
        ids: NDArray[np.intp],
        weights: NDArray[np.float32],
        request: Request,
        matrices: Matrices,
        beta: float,
        linear_beta: float,
        evaluate: Evaluate,
    ) -> NDArray[np.float32]:
        """Weighted sum of the chosen experts' outputs, in the latent space.

        x [T, L] evaluated; ids and weights [T, k]; `request` is for the distinct ids, by rising id unless
        all outputs can be kept apart. Returns [T, L] on the host, so that no GPU work ever waits for a disk.
        Each expert is applied to all its tokens; a token's sum is in the order of expert ids.
        """
        out = np.zeros((len(ids), x.shape[-1]), np.float32)
        if (
            self._on_cpu
        ):  # on the host before several threads read it: CUDA moves an array at its first reading there
            x = mx.array(np.array(x))
        apart = keeps_apart(ids, x.shape[-1])
        outputs: Outputs = {}
        with request:
            for group in request.groups(at_most=self.group):
                outputs |= self._outputs(x, ids, group, matrices, beta, linear_beta, evaluate)
                if not apart:
                    _add(out, ids, weights, outputs)
                    outputs = {}
        _add(out, ids, weights, outputs)
        return out

    def _outputs(
        self,
        x: mx.array,
        ids: NDArray[np.intp],
        group: list[Held],
        matrices: Matrices,
        beta: float,
        linear_beta: float,
        evaluate: Evaluate,
    ) -> Outputs:
        products = {}
        for number, held in enumerate(group):
            tokens = np.nonzero(ids == held.expert)[0]
            with mx.stream(self.streams[number % len(self.streams)]):
                rows = x if len(tokens) == len(ids) else x[mx.array(tokens)]
                w1, w2, w3 = (_operand(w, rows.dtype) for w in matrices(held))
                products[held.expert] = situ_mlp(rows, w1, w3, w2, beta, linear_beta).astype(mx.float32)
        evaluate(list(products.values()))
        return {expert: np.array(product, copy=False) for expert, product in products.items()}


_made: dict[tuple[int, str], list[Any]] = {}


def _streams(device: Any, count: int) -> list[Any]:
    """Streams of this thread; MLX never ends one, so the next engine gets those that are there."""
    pool = _made.setdefault((threading.get_ident(), str(device)), [])
    pool += [mx.new_stream(device) for _ in range(count - len(pool))]
    return pool[:count]


def keeps_apart(ids: NDArray[np.intp], latent: int) -> bool:
    """Whether the outputs of all experts of a step fit until they are summed: then they may come in any order."""
    return ids.size * latent * 4 <= SUMMANDS_MAX


def _add(
    out: NDArray[np.float32], ids: NDArray[np.intp], weights: NDArray[np.float32], outputs: Outputs
) -> None:
    for expert in sorted(outputs):
        tokens, slots = np.nonzero(ids == expert)
        out[tokens] += weights[tokens, slots, None] * outputs[expert]


def _operand(w: Any, dtype: mx.Dtype) -> Any:
    if not isinstance(w, Quantized):
        return w.astype(dtype)
    if w.biases is None:
        return w
    return w._replace(
        scales=w.scales.astype(dtype), biases=w.biases.astype(dtype)
    )  # MLX computes in their dtype
