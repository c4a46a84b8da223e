"""The parts of a layer that the CPU kernels compute in place of numpy's: `reference.model.Parts`.

Owns the conditions under which C computes; elsewhere the reference does. The C code is in custom_kernels/cpu:
parts.c with kda_head.h, heads.h and depth_mix.h, and the products of api.c.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import ResourceError
from k3mlx.reference.model import Parts
from k3mlx.stages import Probe, no_probe

from .cpu import CpuKernels, load_library
from .cpu_linear import Linear
from .cpu_matrix import ExpertRecords

F32 = NDArray[np.float32]
LANES = 16  # of the widest vectors: widths are multiples of it
MAX_WIDTH, MAX_TAPS = 256, 8  # K3_KDA_WIDTH and K3_KDA_TAPS of k3cpu.h
MAX_SOURCES = 64  # K3_SOURCES
FEW_TOKENS = 16  # more are BLAS's: a matrix is read once for all of them there


class KdaJob(ctypes.Structure):
    """struct k3_kda of k3cpu.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "width", "taps")),
        ("x", ctypes.c_void_p * 3),
        *((name, ctypes.c_void_p) for name in ("z", "gate", "b", "windows", "state")),
        *((name, ctypes.c_void_p) for name in ("tap", "A_log", "dt_bias", "o_norm")),
        *((name, ctypes.c_void_p) for name in ("y", "new_windows", "new_state")),
        *((name, ctypes.c_float) for name in ("lower_bound", "eps", "l2_eps")),
    )


class HeadsJob(ctypes.Structure):
    """struct k3_heads of k3cpu.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "tokens", "rows", "cols", "transposed")),
        *((name, ctypes.c_void_p) for name in ("w", "x", "out")),
        *((name, ctypes.c_int64) for name in ("w_stride", "x_head", "x_token", "out_head", "out_token")),
    )


class DepthMixJob(ctypes.Structure):
    """struct k3_depth_mix of k3cpu.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "width", "count")),
        *((name, ctypes.c_void_p) for name in ("source", "norm", "query", "out")),
        ("eps", ctypes.c_float),
    )


class CpuParts(Parts):
    """The parts by the C kernels, in float32. Results do not depend on the threads."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self._mlps: WeakKeyDictionary[Linear, ExpertRecords] = WeakKeyDictionary()  # by their gates

    def kda_step(self, *arguments: Any) -> tuple[F32, F32, F32]:
        """`reference.kda.kda_step`, always in the sequential form. A pass whose stages somebody looks at, and heads of
        a width that is no multiple of LANES, are the reference's."""
        q, k, v, z, b, gate, windows, state, taps, A_log, dt_bias, o_norm, *limits = arguments
        lower_bound, eps, l2_eps, probe = (*limits, no_probe)[:4]
        (tokens, heads), width = b.shape, o_norm.shape[0]
        if probe is not no_probe or width % LANES or width > MAX_WIDTH or taps.shape[-1] > MAX_TAPS:
            return super().kda_step(*arguments)
        given = [
            np.ascontiguousarray(array, np.float32)
            for array in (q, k, v, z, gate, b, windows, state, taps, A_log, dt_bias, o_norm)
        ]
        y = np.empty((tokens, heads * width), np.float32)
        made = y, np.empty_like(windows), np.empty_like(state)
        addresses = [array.ctypes.data for array in (*given, *made)]
        streams = (ctypes.c_void_p * 3)(*addresses[:3])
        job = KdaJob(tokens, heads, width, taps.shape[-1], streams, *addresses[3:], lower_bound, eps, l2_eps)
        _library().k3_kda_step(self.kernels.handle, self.kernels.threads, ctypes.byref(job))
        return made

    def per_head(self, x: F32, maps: F32) -> F32:
        """`reference.mla.per_head`: x [T, H, a], maps [H, a, b] -> [T, H, b], for few tokens and maps whose rows or
        columns lie one after the other."""
        tokens, heads, _ = x.shape
        transposed = maps.strides[2] != maps.itemsize
        w = maps.transpose(0, 2, 1) if transposed else maps  # [H, rows, cols] as stored
        in_order = w.strides[1:] == (w.shape[2] * w.itemsize, w.itemsize) and w.shape[2] % LANES == 0
        if tokens > FEW_TOKENS or not in_order or x.strides[2] != x.itemsize:
            return super().per_head(x, maps)
        out = np.empty((tokens, heads, maps.shape[2]), np.float32)
        strides = w.strides[0], x.strides[1], x.strides[0], out.strides[1], out.strides[0]
        job = HeadsJob(
            *(heads, tokens, w.shape[1], w.shape[2], transposed),
            *(array.ctypes.data for array in (w, x, out)),
            *(stride // 4 for stride in strides),
        )
        _library().k3_heads_product(self.kernels.handle, self.kernels.threads, ctypes.byref(job))
        return out

    def attn_res_mix(self, blocks: Sequence[F32], partial: F32, norm: F32, query: F32, eps: float) -> F32:
        """`reference.attn_res.attn_res_mix`, for widths that are a multiple of LANES."""
        sources = [*blocks, partial]
        if not blocks or partial.shape[1] % LANES or len(sources) > MAX_SOURCES:
            return super().attn_res_mix(blocks, partial, norm, query, eps)
        given = [np.ascontiguousarray(array, np.float32) for array in (*sources, norm, query)]
        out = np.empty(partial.shape, np.float32)
        *addresses, norm_address, query_address = (array.ctypes.data for array in given)
        pointers = (ctypes.c_void_p * len(sources))(*addresses)
        job = DepthMixJob(
            *partial.shape,
            len(sources),
            ctypes.addressof(pointers),
            norm_address,
            query_address,
            out.ctypes.data,
            eps,
        )
        _library().k3_mix_depth(self.kernels.handle, self.kernels.threads, ctypes.byref(job))
        return out

    def products(self, x: F32, weights: Sequence[Any]) -> list[F32]:
        """`reference.ops.products`: x w^T for each of several weights, those kept as stored in one call."""
        if all(isinstance(w, Linear) for w in weights):
            return self.kernels.products(x, [w.matrix for w in weights])
        return super().products(x, weights)

    def situ_mlp(
        self, x: F32, gate: Any, up: Any, down: Any, beta: float, linear_beta: float, probe: Probe = no_probe
    ) -> F32:
        """`reference.ops.situ_mlp`, in one call for weights kept as stored, unless somebody looks at its stages."""
        stored = all(isinstance(w, Linear) for w in (gate, up, down))
        if probe is not no_probe or not stored or gate.matrix.kind != up.matrix.kind:
            return super().situ_mlp(x, gate, up, down, beta, linear_beta, probe)
        mlp = self._mlps.get(gate)
        if mlp is None:
            mlp = self._mlps[gate] = ExpertRecords.of((gate.matrix, down.matrix, up.matrix))
        return self.kernels.situ_mlp(x, mlp, beta, linear_beta)


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, if it describes the jobs as this file does. Raises ResourceError."""
    library = load_library()
    sizes = library.k3_kda_size(), library.k3_heads_size(), library.k3_depth_mix_size()
    if sizes != tuple(map(ctypes.sizeof, (KdaJob, HeadsJob, DepthMixJob))):
        raise ResourceError(
            "the CPU kernels describe their jobs differently from this package; build them again"
        )
    return library
