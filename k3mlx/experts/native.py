"""Routed experts by the C kernels, straight from their slots, and the choice between them and numpy.

Owns how a layer's mixture becomes calls of `experts_mix`. The reads are the store's, the arithmetic is
`custom_kernels/cpu`. Sums are in the order of ids whatever order the experts come in, as in `compute.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from k3mlx.config import ModelConfig
from k3mlx.errors import K3Error, ModelFilesError, ResourceError, UsageError
from k3mlx.kernels.cpu import CpuKernels, load_cpu_kernels, refuse_damaged
from k3mlx.kernels.cpu_matrix import ExpertRecords, Matrix, stack_experts
from k3mlx.kernels.cpu_queue import Later
from k3mlx.kernels.cpu_verify import verify
from k3mlx.reference.ops import Array

from .compute import NumpyExperts, Router
from .request import Request
from .store import ExpertStore, Held

EXPERT_KERNELS = ("auto", "native", "numpy")
GROUP = 32  # experts of one call at most


class NativeExperts(NumpyExperts):
    """As `NumpyExperts`, in float32 by the C kernels: nothing is decoded to memory first."""

    def __init__(
        self,
        store: ExpertStore,
        config: ModelConfig,
        kernels: CpuKernels,
        router: Callable[[int], Router | None] | None = None,
    ) -> None:
        super().__init__(store, config, np.float32, router)
        self._kernels = kernels
        self._records: WeakKeyDictionary[Held, ExpertRecords] = WeakKeyDictionary()  # while it is in memory
        self._betas = config.activation_situ_beta, config.activation_situ_linear_beta
        self.kernel = kernels.describe()

    @property
    def product_seconds(self) -> float:
        return self._kernels.spent.seconds

    def _mix(
        self, x: Array, ids: NDArray[np.intp], weights: Array, layer: int, request: Request, apart: bool
    ) -> Array:
        """Each group of experts at once. Apart, an expert's output goes to a row of its own for each token and
        the rows are summed at the end; otherwise the experts come in the order of ids and add up as they come."""
        if len(ids) == 1:
            return self._mix_token(x, ids, weights, layer, request)
        x = np.asarray(x)
        tokens_count, chosen = ids.shape
        places = _places(ids, weights)
        rows_count = tokens_count * chosen if apart else tokens_count
        out = np.zeros((rows_count, x.shape[1]), np.float32)
        for group in request.groups(GROUP):
            tokens, rows, factors = zip(*(places(held.expert) for held in group), strict=True)
            records = [self._recorded(held) for held in group]
            with _named(layer, group):
                self._kernels.experts_mix(
                    x, records, tokens, factors, *self._betas, out, rows if apart else None
                )
        return np.add.reduce(out.reshape(chosen, tokens_count, -1)) if apart else out

    def _mix_token(
        self, x: Array | Later, ids: NDArray[np.intp], weights: Array, layer: int, request: Request
    ) -> Array:
        """One token. Experts that are all there at once add up as they are computed, in one call with what x waits
        for; otherwise that is computed while they are read, and outputs are kept and summed at the end, with the same
        bits."""
        if not request.here:
            x = np.asarray(x)
        factor = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
        outputs: dict[int, Array] = {}
        whole = None
        for group in request.groups(GROUP):
            experts = [held.expert for held in group]
            records = [self._recorded(held) for held in group]
            factors = np.array([factor[expert] for expert in experts], np.float32)
            at_once = len(experts) == len(request) and experts == sorted(experts)
            with _named(layer, group):
                if at_once and isinstance(x, Later):
                    words = stack_experts(records, x.shape[1])
                    later, finite = x.queue.experts(x, words, factors, *self._betas)
                    whole = np.asarray(later)
                    if not finite.value:
                        refuse_damaged(records)
                elif at_once:
                    whole = self._kernels.mix_token(np.asarray(x), records, factors, *self._betas)
                else:
                    apart = self._kernels.mix_token(np.asarray(x), records, factors, *self._betas, apart=True)
                    outputs.update(zip(experts, apart, strict=True))
        if whole is None:
            whole = np.zeros_like(np.asarray(x))
            for expert in sorted(outputs):
                whole += outputs[expert]
        return whole

    def _recorded(self, held: Held) -> ExpertRecords:
        """What the kernels are told of an expert, made at its first use."""
        found = self._records.get(held)
        if found is None:
            found = self._records[held] = _records(held)
        return found


@contextmanager
def _named(layer: int, group: Sequence[Held]) -> Iterator[None]:
    """Say of which experts one is damaged."""
    try:
        yield
    except ModelFilesError as error:
        names = ", ".join(f"{held.expert} ({held.placement.pieces[0].path})" for held in group)
        raise ModelFilesError(f"layer {layer}, one of the experts {names}: {error}") from None


def _places(
    ids: NDArray[np.intp], weights: Array
) -> Callable[[int], tuple[NDArray[np.intp], NDArray[np.intp], Array]]:
    """For an expert of ids [T, k]: its tokens, rows rank * T + token, rank among the token's experts, and weights."""
    rank = np.argsort(np.argsort(ids, axis=1), axis=1)
    order = np.argsort(ids, axis=None, kind="stable")  # by expert, each one's tokens by rising number
    found, token = ids.ravel()[order], order // ids.shape[1]
    row, weight = rank.ravel()[order] * len(ids) + token, weights.ravel()[order]
    first, last = (found.searchsorted(found, side=side).tolist() for side in ("left", "right"))
    bounds = dict(zip(found.tolist(), zip(first, last, strict=True), strict=True))

    def of(expert: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Array]:
        start, stop = bounds.get(expert, (0, 0))
        return token[start:stop], row[start:stop], weight[start:stop]

    return of


def _records(held: Held) -> ExpertRecords:
    """An expert's tensors as the kernels take them."""
    parts = held.parts
    if "w1.weight" in parts:
        return ExpertRecords.of([Matrix.dense(parts[f"{name}.weight"]) for name in ("w1", "w2", "w3")])
    kinds = ("packed", "scale")
    return ExpertRecords.of([parts[f"{name}.weight_{kind}"] for name in ("w1", "w2", "w3") for kind in kinds])


def make_experts(
    kernel: str,
    store: ExpertStore,
    config: ModelConfig,
    dtype: DTypeLike,
    router: Callable[[int], Router | None] | None,
    threads: int | None,
) -> tuple[NumpyExperts, str | None]:
    """The experts of a numpy engine, and a line about it if they are not computed by what `auto` prefers.

    kernel: `native`, `numpy`, or `auto`: native where it is built, has computed right on this machine just
    now, and the dtype is float32. Raises UsageError for another name, ResourceError for a native kernel that
    was asked for and cannot be had.
    """
    if kernel not in EXPERT_KERNELS:
        raise UsageError(
            f"experts_kernel is {kernel!r}, expected one of {', '.join(EXPERT_KERNELS)} on numpy"
        )
    if np.dtype(dtype) != np.float32:
        if kernel == "native":
            raise UsageError(f"experts_kernel native computes in float32, not {np.dtype(dtype)}")
        kernel = "numpy"
    kernels, why = choose_kernels(kernel, threads)
    if kernels is not None:
        return NativeExperts(store, config, kernels, router), None
    return NumpyExperts(store, config, dtype, router), why and f"experts on numpy: {why}"


def choose_kernels(kernel: str, threads: int | None) -> tuple[CpuKernels | None, str | None]:
    """The C kernels if they are wanted and compute right, else None and, for `auto`, why there are none.

    kernel: `native`, `auto`, or another, which wants none. Raises ResourceError if `native` cannot be had.
    """
    if kernel not in ("auto", "native"):
        return None, None
    try:
        return verified_kernels(threads), None
    except ResourceError as error:
        if kernel == "native":
            raise
        return None, str(error)


def verified_kernels(threads: int | None) -> CpuKernels:
    """The C kernels for this machine, checked just now. Raises ResourceError where there are none, or wrong ones."""
    kernels = load_cpu_kernels(threads=threads)
    try:
        wrong = [check for check in verify(kernels) if not check.ok]
    except K3Error as error:
        raise ResourceError(f"the CPU kernels failed their check: {error}") from error
    if wrong:
        found = ", ".join(f"{check.name} by {check.worst:.1e}" for check in wrong)
        raise ResourceError(f"the CPU kernels ({kernels.isa}) compute wrong on this machine: {found}")
    return kernels
