"""Launchers of what the CPU kernels compute of attention, head by head: the KDA step, and latent attention's maps.

Owns the conditions under which C computes; elsewhere the reference does. The C code is in custom_kernels/cpu:
attention.c, kda_head.h, heads.h.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import ResourceError
from k3mlx.reference import kda, mla
from k3mlx.stages import Probe, no_probe

from .cpu import CpuKernels, load_library

F32 = NDArray[np.float32]
LANES = 16  # of the widest vectors: widths are multiples of it
MAX_WIDTH, MAX_TAPS = 256, 8  # K3_KDA_WIDTH and K3_KDA_TAPS of k3cpu.h
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


@dataclass(frozen=True)
class CpuAttention:
    """The parts of `reference.model.AttentionParts` by the C kernels. Results do not depend on the threads."""

    kernels: CpuKernels

    def kda_step(
        self,
        q: F32,
        k: F32,
        v: F32,
        z: F32,
        b: F32,
        gate: F32,
        windows: F32,
        state: F32,
        taps: F32,
        A_log: F32,
        dt_bias: F32,
        o_norm: F32,
        lower_bound: float,
        eps: float,
        l2_eps: float,
        probe: Probe = no_probe,
    ) -> tuple[F32, F32, F32]:
        """`reference.kda.kda_step`, always in the sequential form. A pass whose stages somebody looks at, and heads of
        a width that is no multiple of LANES, are the reference's."""
        (tokens, heads), width = b.shape, o_norm.shape[0]
        if probe is not no_probe or width % LANES or width > MAX_WIDTH or taps.shape[-1] > MAX_TAPS:
            return kda.kda_step(
                q, k, v, z, b, gate, windows, state, taps, A_log, dt_bias, o_norm, lower_bound, eps, l2_eps, probe
            )  # fmt: skip
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
            return mla.per_head(x, maps)
        out = np.empty((tokens, heads, maps.shape[2]), np.float32)
        strides = w.strides[0], x.strides[1], x.strides[0], out.strides[1], out.strides[0]
        job = HeadsJob(
            *(heads, tokens, w.shape[1], w.shape[2], transposed),
            *(array.ctypes.data for array in (w, x, out)),
            *(stride // 4 for stride in strides),
        )
        _library().k3_heads_product(self.kernels.handle, self.kernels.threads, ctypes.byref(job))
        return out


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, if it describes the jobs as this file does. Raises ResourceError."""
    library = load_library()
    sizes = library.k3_kda_size(), library.k3_heads_size()
    if sizes != (ctypes.sizeof(KdaJob), ctypes.sizeof(HeadsJob)):
        raise ResourceError(
            "the CPU kernels describe attention differently from this package; build them again"
        )
    return library
