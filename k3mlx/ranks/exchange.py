"""The tensors between ranks: activations go out from rank 0, partial sums come back. By `mx.distributed` only.

Owns the collectives, their stream and their counters. Every rank must call the same ones in the same order;
who says which, and when, is `links.py`'s and `team.py`'s business. Used by the thread that owns MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import K3Error

Evaluate = Callable[[list[mx.array]], None]  # waits for arrays, under a deadline
Floats = NDArray[np.float32]
GRACE_SECONDS = (
    1.0  # after a failure, in which the links end the process with the name of the rank that is lost
)


@dataclass
class Traffic:
    """What a rank has sent and received of tensors. seconds: in which it waited for them."""

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


class Exchange:
    """Collectives over all ranks of a launch, on a CPU stream of their own."""

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.traffic = Traffic()
        self._group = group
        self._stream = mx.new_stream(mx.cpu)

    def begin(self, values: Floats) -> mx.array:
        """Start to hand every rank the `values` [n, m] of all; evaluating the result [R, n, m] ends it."""
        mine = mx.array(values[None])
        with mx.stream(self._stream):
            everybody = mx.distributed.all_gather(mine, group=self._group, stream=self._stream)
        mx.async_eval(everybody)
        others = self.size - 1
        self.traffic.messages += 1
        self.traffic.bytes_sent += others * values.nbytes
        self.traffic.bytes_received += others * values.nbytes
        return everybody

    def end(self, everybody: mx.array, evaluate: Evaluate) -> Floats:
        """Wait for what `begin` started: [R, n, m], by rank."""
        started = perf_counter()
        try:
            evaluate([everybody])
        except RuntimeError as error:
            sleep(GRACE_SECONDS)
            raise K3Error(f"an exchange between the ranks failed: {error}") from None
        self.traffic.seconds += perf_counter() - started
        return np.array(everybody)

    def bytes_from_zero(self, data: bytes, length: int) -> bytes:
        """What rank 0 gives as `data`, at most `length` bytes, on every rank."""
        block = np.frombuffer(data.ljust(length, b"\0"), np.uint8)
        everybody = mx.distributed.all_gather(mx.array(block[None]), group=self._group, stream=self._stream)
        mx.eval(everybody)
        return np.array(everybody)[0].tobytes().rstrip(b"\0")


def join() -> Exchange:
    """The collectives of this launch. Blocks until all ranks are there, without a limit of its own."""
    return Exchange(mx.distributed.init(strict=True))


def pack(latent: Floats, ids: NDArray[np.intp], weights: Floats) -> Floats:
    """Latents [T, L], ids and weights [T, k] as one array [T, L + 2k]; ids are small whole numbers, so exact."""
    return np.concatenate([latent, ids.astype(np.float32), weights.astype(np.float32)], axis=1)


def unpack(packed: Floats, chosen: int) -> tuple[Floats, NDArray[np.intp], Floats]:
    """What `pack` was given; `chosen` is k."""
    latent, ids, weights = np.split(packed, [-2 * chosen, -chosen], axis=1)
    return np.ascontiguousarray(latent), ids.astype(np.intp), np.ascontiguousarray(weights)
