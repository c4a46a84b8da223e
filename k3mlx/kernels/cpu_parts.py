"""The parts of a layer that the CPU kernels compute in place of numpy's: `reference.model.Parts`.

Owns the conditions under which C computes; elsewhere the reference does. Results for few tokens are computed later,
many parts in one call (`cpu_queue.py`). The C code is in custom_kernels/cpu: sequence.c and what it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from k3mlx.clock import Clock
from k3mlx.reference.model import Parts
from k3mlx.stages import Probe, no_probe

from .cpu import MANY, CpuKernels
from .cpu_linear import Linear
from .cpu_matrix import ExpertRecords, stack_experts
from .cpu_queue import Kind, Later, Queue, bits

F32 = NDArray[np.float32]
LANES = 16  # of the widest vectors: widths are multiples of it
MAX_WIDTH, MAX_TAPS = 256, 8  # K3_KDA_WIDTH and K3_KDA_TAPS of k3cpu.h
MAX_SOURCES = 64  # K3_SOURCES
MAX_CACHE_WIDTH = 1024  # K3_ATTENTION_WIDTH
MAX_EXPERTS = 1024  # K3_ROUTED
FEW_TOKENS = 16  # the results of more are large and computed at once
_ONE = np.ones(1, np.float32)


class CpuParts(Parts):
    """The parts by the C kernels, in float32. Results do not depend on the threads. What a part gives for up to
    FEW_TOKENS tokens may be a `Later`, and what it is given too."""

    def __init__(self, kernels: CpuKernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.queue = Queue(kernels)
        self._mlps: WeakKeyDictionary[Linear, ExpertRecords] = WeakKeyDictionary()  # by their gates

    def begin(self, clock: Clock) -> None:
        self.queue.clear()  # of a pass that was given up
        self.queue.clock = clock

    def settle(self) -> None:
        self.queue.run()

    def kda_step(self, *arguments: Any) -> tuple[Any, F32, F32]:
        """`reference.kda.kda_step`, always in the sequential form; the new windows and state are there after
        `settle`. A pass whose stages somebody looks at, and heads of a width that is no multiple of LANES, are the
        reference's."""
        q, k, v, z, b, gate, windows, state, taps, A_log, dt_bias, o_norm, *limits = arguments
        lower_bound, eps, l2_eps, probe = (*limits, no_probe)[:4]
        (tokens, heads), width = b.shape, o_norm.shape[0]
        if probe is not no_probe or width % LANES or width > MAX_WIDTH or taps.shape[-1] > MAX_TAPS:
            return super().kda_step(*(_now(argument) for argument in arguments))
        at, y = self.queue.at, self.queue.later((tokens, heads * width))
        new_windows, new_state = np.empty_like(windows), np.empty_like(state)
        arrays = q, k, v, z, gate, b, windows, state, taps, A_log, dt_bias, o_norm, y, new_windows, new_state
        sizes = tokens, heads, width, taps.shape[-1]
        self.queue.add(Kind.KDA, *sizes, *map(at, arrays), *map(bits, (lower_bound, eps, l2_eps)))
        return self._given(y), new_windows, new_state

    def attend(self, q: Any, rows: F32, kv_b: F32, nope: int, rank: int, scale: float) -> Any:
        """`reference.model.Parts.attend`: q [T, H, n+e], rows [S, r+e], maps [H*(n+m), r] -> [T, H, m]. Many tokens are
        BLAS's, which reads a head's maps once for all of them."""
        tokens, heads, head = q.shape
        width = rows.shape[1]
        fits = rank % LANES == 0 and width % LANES == 0 and width <= MAX_CACHE_WIDTH
        if tokens > FEW_TOKENS or not fits:
            self.settle()  # the newest rows
            return super().attend(_now(q), rows, kv_b, nope, rank, scale)
        queue, value = self.queue, kv_b.shape[0] // heads - nope
        out = queue.later((tokens, heads, value))
        sizes = tokens, heads, nope, head - nope, rank, value, len(rows)
        queue.add(Kind.ATTENTION, *sizes, *map(queue.at, (q, rows, kv_b, out)), bits(scale))
        return out

    def gated(self, x: Any, gate: Any) -> Any:
        """x sigmoid(gate), of the same shape."""
        if len(x) > FEW_TOKENS:
            return super().gated(_now(x), _now(gate))
        return self.queue.pairs(Kind.GATE, x, gate)

    def attn_res_mix(self, blocks: Sequence[Any], partial: Any, norm: F32, query: F32, eps: float) -> Any:
        """`reference.attn_res.attn_res_mix`, for widths that are a multiple of LANES."""
        queue, count = self.queue, len(blocks) + 1
        if not blocks:
            return partial
        if partial.shape[1] % LANES or count > MAX_SOURCES:
            return super().attn_res_mix([*map(_now, blocks)], _now(partial), norm, query, eps)
        out = queue.later(partial.shape)
        *arrays, last = map(queue.at, (norm, query, out, partial))
        sources = [*map(queue.at, blocks), last]
        queue.add(Kind.DEPTH_MIX, *partial.shape, count, *arrays, bits(eps), *sources)
        return self._given(out)

    def rms_norm(self, x: Any, weight: F32, eps: float) -> Any:
        """`reference.ops.rms_norm` of rows x [T, D], for widths that are a multiple of LANES."""
        if len(x.shape) != 2 or x.shape[1] % LANES:
            return super().rms_norm(_now(x), weight, eps)
        return self._norm(x, weight, eps)

    def latent_rows(self, kv: Any, weight: F32, eps: float) -> Any:
        """`reference.model.Parts.latent_rows`, for ranks that are a multiple of LANES."""
        if len(weight) % LANES:
            return super().latent_rows(_now(kv), weight, eps)
        return self._norm(kv, weight, eps)

    def _norm(self, x: Any, weight: F32, eps: float) -> Any:
        """The first columns of x [T, any], as many as there are weights, normalised; the others as they are."""
        queue, out, (tokens, width) = self.queue, self.queue.later(x.shape), x.shape
        arrays = queue.at(x), queue.at(weight), queue.at(out)
        queue.add(Kind.NORM, tokens, len(weight), width - len(weight), *arrays, bits(eps))
        return self._given(out)

    def fill(self, room: F32, rows: Any) -> None:
        """room[...] = rows, of the same shape; room is C-contiguous."""
        if isinstance(rows, Later):
            at = self.queue.at(rows)
            self.queue.add(Kind.COPY, room.size, at, at, self.queue.keep(room))
        else:
            super().fill(room, rows)

    def products(self, x: Any, weights: Sequence[Any]) -> list[Any]:
        """`reference.ops.products`: x w^T for each of several weights, those kept as stored in one call."""
        matrices = []
        for w in weights:
            if not isinstance(w, Linear):
                return super().products(_now(x), weights)
            matrices.append(w.matrix)
        fits = len(x.shape) == 2 and 0 < len(x) <= FEW_TOKENS and len(matrices) <= MANY
        for matrix in matrices:
            fits = fits and matrix.shape[1] == x.shape[1] and not matrix.is_mxfp4
        if not fits:
            return self.kernels.products(_now(x), matrices)  # looks at the results of MXFP4, and refuses
        queue, tokens = self.queue, len(x)
        outs: list[Any] = [queue.later((tokens, matrix.shape[0])) for matrix in matrices]
        records = [matrix.address for matrix in matrices]
        queue.kept += matrices
        queue.add(Kind.PRODUCTS, len(matrices), tokens, queue.at(x), *records, *map(queue.at, outs))
        return outs

    def situ_mlp(
        self, x: Any, gate: Any, up: Any, down: Any, beta: float, linear_beta: float, probe: Probe = no_probe
    ) -> Any:
        """`reference.ops.situ_mlp`, in one call for weights kept as stored, unless somebody looks at its stages."""
        stored = isinstance(gate, Linear) and isinstance(up, Linear) and isinstance(down, Linear)
        if probe is not no_probe or not stored or gate.matrix.kind != up.matrix.kind:
            return super().situ_mlp(_now(x), gate, up, down, beta, linear_beta, probe)
        mlp = self._mlps.get(gate)
        if mlp is None:
            mlp = self._mlps[gate] = ExpertRecords.of((gate.matrix, down.matrix, up.matrix))
        if not 0 < len(x) <= FEW_TOKENS or mlp.has_mxfp4:
            return self.kernels.situ_mlp(_now(x), mlp, beta, linear_beta)
        return self.queue.experts(x, stack_experts([mlp], x.shape[1]), _ONE, beta, linear_beta)[0]

    def select_topk(self, logits: Any, bias: F32, k: int, scaling: float) -> tuple[NDArray[np.intp], F32]:
        """`reference.moe.select_topk` of logits [T, E], computed at once."""
        tokens, experts = logits.shape
        if not k <= experts <= MAX_EXPERTS:
            return super().select_topk(_now(logits), bias, k, scaling)
        queue, ids = self.queue, np.empty((tokens, k), np.int64)
        weights = queue.later((tokens, k))
        arrays = queue.at(logits), queue.at(bias), queue.keep(ids), queue.at(weights)
        queue.add(Kind.ROUTE, tokens, experts, k, *arrays, bits(scaling))
        return ids, np.asarray(weights)

    def _given(self, result: Later) -> Any:
        """The result itself where there are many tokens."""
        return result if len(result) <= FEW_TOKENS else np.asarray(result)


def _now(array: Any) -> Any:
    """The array, computed."""
    return np.asarray(array) if isinstance(array, Later) else array
