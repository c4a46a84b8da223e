"""Launchers of the CPU kernels in C: load the library, check arguments, call, refuse damaged weights.

Owns the choice of instruction set and threads and everything that the C code assumes. The C code is in
custom_kernels/cpu, its compilation in `cpu_build.py`, its check on this machine in `cpu_verify.py`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import ModelFilesError, ResourceError, UsageError

from . import cpu_build
from .cpu_matrix import RECORD, ExpertRecords, Matrix, stack_experts

ISA_NAMES = ("avx512vnni", "avx512", "avx2", "neon", "portable")  # best first
INNER_BYTES = 32 << 20  # SiTU values of one call of experts_mix; more pairs than fit run in several calls
MANY = 8  # matrices of one call at most: K3_MANY of k3cpu.h
_SCALE_NAN = 255

F32 = NDArray[np.float32]
# w1, w2, w3 as stored: see `experts_mix`
Expert = ExpertRecords | tuple[NDArray, ...] | tuple[Matrix, Matrix, Matrix]


def default_threads() -> int:
    """`OMP_NUM_THREADS`, else the performance cores (macOS), else the cores this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdigit() and int(given) > 0:
        return int(given)
    if sys.platform == "darwin":
        for key in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
            answer = subprocess.run(
                ["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, check=False
            )
            if answer.returncode == 0 and answer.stdout.strip().isdigit():
                return max(1, int(answer.stdout))
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_isas() -> list[str]:
    """The instruction sets that the library has and this CPU can run, best first. Raises ResourceError."""
    library = load_library()
    return [name for name in ISA_NAMES if library.k3_isa_named(name.encode())]


@dataclass
class Spent:
    """Seconds inside the library so far."""

    seconds: float = 0.0


@dataclass(frozen=True)
class CpuKernels:
    """The kernels for one instruction set and number of threads. Results do not depend on the number of threads, nor
    on how tokens are grouped into calls, except that avx512vnni computes a call with a single token and 4-bit weights
    by integers, with other roundings. `load_cpu_kernels` makes one. Calls from several Python threads take turns."""

    isa: str
    threads: int
    handle: int  # of the instruction set, for the library
    spent: Spent = field(default_factory=Spent, compare=False)

    def matmul(self, x: F32, matrix: Matrix, out: F32 | None = None) -> F32:
        """x W^T with float32 accumulation: x [..., in] float32, matrix [out, in] -> [..., out] float32.

        `out`, if given, is C-contiguous and overwritten. Raises UsageError for arguments that do not fit and
        ModelFilesError for an MXFP4 scale byte 255.
        """
        shape = (*x.shape[:-1], matrix.shape[0])
        if out is None:
            out = np.empty(shape, np.float32)
        else:
            _check_out(out, shape)
        self._products(x, [matrix], [out])
        return out

    def products(self, x: F32, matrices: Sequence[Matrix]) -> list[F32]:
        """x W^T for each of several matrices [out, in], in one call for up to MANY of them: as `matmul` for each."""
        outs = [np.empty((*x.shape[:-1], matrix.shape[0]), np.float32) for matrix in matrices]
        for first in range(0, len(matrices), MANY):
            some = slice(first, first + MANY)
            self._products(x, matrices[some], outs[some])
        return outs

    def _products(self, x: F32, matrices: Sequence[Matrix], outs: Sequence[F32]) -> None:
        for matrix in matrices:
            if x.dtype != np.float32 or x.ndim < 1 or x.shape[-1] != matrix.shape[1]:
                expected = f"expected float32 [..., {matrix.shape[1]}] for a matrix {matrix.shape}"
                raise UsageError(f"x is {x.dtype}{x.shape}; {expected}")
        x = _in_order(x)
        cols, count = x.shape[-1], len(matrices)
        if x.size == 0:
            return
        addresses = (ctypes.c_void_p * count)(*[matrix.address for matrix in matrices])
        results = (ctypes.c_void_p * count)(*map(_address, outs))
        self._call(
            load_library().k3_matmul,
            *(self.handle, self.threads, addresses, count, _address(x), cols, x.size // cols, results),
        )
        for matrix, out in zip(matrices, outs, strict=True):
            if matrix.is_mxfp4 and not np.isfinite(out).all():
                _refuse_nan_scales([matrix.arrays[1]], ["scale"])

    def experts_mix(
        self,
        x: F32,
        experts: Sequence[Expert],
        tokens: Sequence[NDArray[np.integer]],
        weights: Sequence[NDArray[np.floating]],
        beta: float,
        linear_beta: float,
        out: F32 | None = None,
        rows: Sequence[NDArray[np.integer]] | None = None,
    ) -> F32:
        """Weighted sum of gated MLPs: out[t] += weight * SiTU(x[t] w1^T, x[t] w3^T) w2^T.

        x [T, L] float32. Each expert is its six stored MXFP4 tensors (w1 packed, w1 scale, w2 packed, w2
        scale, w3 packed, w3 scale; uint8, rows contiguous, any alignment), or three matrices (w1, w2, w3) of
        any format, or `ExpertRecords` of either; all of one call have the same shapes. tokens[i] are the rows
        of x that expert i works on, weights[i] what each is multiplied by, and rows[i] the rows of `out` it adds
        to (default: tokens[i]); an expert names a row once. Returns out: new zeros [T, L] float32, or the given
        array [any, L], which is added to. A row's sum is formed in the order of `experts`, so that calls with
        consecutive parts of a list give the bits of one call with the whole; experts that come in another order
        can be given rows of their own, to be summed later. Source: model specification §2.6.

        Raises UsageError for arguments that do not fit and ModelFilesError for a scale byte 255.
        """
        if x.dtype != np.float32 or x.ndim != 2:
            raise UsageError(f"x is {x.dtype}{x.shape}; expected float32 [T, L]")
        if out is None:
            out = np.zeros(x.shape, np.float32)
        else:
            _check_out(out, (len(out), x.shape[1]))
        rows = tokens if rows is None else rows
        lengths = [len(experts), len(tokens), len(weights), len(rows)]
        if len(set(lengths)) > 1:
            raise UsageError(f"experts, tokens, weights and rows number {lengths}; expected as many of each")
        if not experts:
            return out
        described = [e if isinstance(e, ExpertRecords) else ExpertRecords.of(e) for e in experts]
        start = np.zeros(len(tokens) + 1, np.int64)
        counts = [len(t) for t in tokens]
        np.cumsum(counts, out=start[1:])
        if start[-1] == 0:
            return out
        token, row = _flat(tokens, counts, len(x), "tokens"), _flat(rows, counts, len(out), "rows")
        weight = np.concatenate(weights).astype(np.float32, copy=False)
        if [len(w) for w in weights] != counts:
            raise UsageError("an expert has not as many weights as tokens")
        self._mix(x, described, (start, token, row, weight), beta, linear_beta, out)
        return out

    def mix_token(
        self,
        x: F32,
        experts: Sequence[ExpertRecords],
        weights: F32,
        beta: float,
        linear_beta: float,
        apart: bool = False,
    ) -> F32:
        """`experts_mix` for a single token that all of `experts` work on: x [1, L], weights [experts] -> [1, L], or
        each one's summand if `apart`, [experts, L]."""
        if x.dtype != np.float32 or x.ndim != 2 or len(x) != 1 or weights.shape != (len(experts),):
            raise UsageError(
                f"x is {x.dtype}{x.shape}, weights {weights.shape}; expected float32 [1, L], [experts]"
            )
        out = np.zeros((len(experts) if apart else 1, x.shape[1]), np.float32)
        if experts:
            numbers, zeros = _one_each(len(experts))
            pairs = numbers, zeros, numbers[:-1] if apart else zeros, weights.astype(np.float32, copy=False)
            self._mix(x, experts, pairs, beta, linear_beta, out)
        return out

    def situ_mlp(self, x: F32, mlp: ExpertRecords, beta: float, linear_beta: float) -> F32:
        """SiTU(x gate^T, x up^T) down^T for a dense or shared MLP (gate, down, up): x [T, D] -> [T, D] float32."""
        if len(x) == 1:
            return self.mix_token(x, [mlp], _ONE, beta, linear_beta)
        every, ones = np.arange(len(x)), np.ones(len(x), np.float32)
        return self.experts_mix(x, [mlp], [every], [ones], beta, linear_beta)

    def _mix(
        self,
        x: F32,
        experts: Sequence[ExpertRecords],
        pairs: tuple[NDArray, NDArray, NDArray, F32],
        beta: float,
        linear_beta: float,
        out: F32,
    ) -> None:
        """Add to out; pairs: where each expert's begin [experts + 1], then their tokens, rows and weights."""
        start, token, row, weight = pairs
        records = stack_experts(experts, x.shape[1])  # [experts, 3]
        x = _in_order(x)
        limit = max(1, INNER_BYTES // (4 * experts[0].matrices[0].shape[0]))
        if len(token) <= limit:
            batches = [(0, len(experts), pairs)]
        else:
            batches = [
                (first, last, (part - part[0], token[some], row[some], weight[some]))
                for first, last, part in _batches(start, limit)
                for some in [slice(int(part[0]), int(part[-1]))]
            ]
        for first, last, arrays in batches:
            self._call(
                load_library().k3_experts_mix,
                *(self.handle, self.threads, _address(records) + records.strides[0] * first, last - first),
                *map(_address, arrays),
                *(_address(x), x.shape[1], len(x), beta, linear_beta, _address(out), x.shape[1]),
            )
        if not isfinite(np.add.reduce(out, axis=None)):  # NaN or infinity anywhere, or a sum that overflows
            refuse_damaged(experts)

    def read(self, data: NDArray) -> None:
        """Do nothing but read the bytes of a C-contiguous array on all threads: the yardstick of benchmarks."""
        if not data.flags.c_contiguous:
            raise UsageError(f"an array {data.shape} is not C-contiguous")
        load_library().k3_read(self.handle, self.threads, _address(data), data.nbytes)

    def _call(self, function: Any, *arguments: Any) -> None:
        started = perf_counter()
        status = function(*arguments)
        self.spent.seconds += perf_counter() - started
        if status:
            raise MemoryError("no memory for the working buffers of the CPU kernels")

    def describe(self) -> str:
        """One phrase for a report: instruction set and threads."""
        return f"C kernels, {self.isa}, {self.threads} thread{'s' if self.threads != 1 else ''}"


def load_cpu_kernels(isa: str | None = None, threads: int | None = None) -> CpuKernels:
    """The kernels for `isa` (default `K3_CPU_ISA`, else the best this CPU can run) and `threads`.

    Raises ResourceError, saying why and what to do, when the library is not there or not for this machine.
    """
    names = available_isas()
    wanted = isa or os.environ.get("K3_CPU_ISA") or names[0]
    if wanted not in names:
        raise ResourceError(f"CPU kernels for {wanted!r} do not run here; expected one of {', '.join(names)}")
    count = default_threads() if threads is None else threads
    if count < 1:
        raise UsageError(f"{count} CPU threads; expected at least 1")
    return CpuKernels(wanted, count, load_library().k3_isa_named(wanted.encode()))


_ONE = np.ones(1, np.float32)


@functools.cache
def _one_each(experts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where pairs begin when each expert has one, and the number 0 for each."""
    return np.arange(experts + 1), np.zeros(experts, np.int64)


def _batches(start: NDArray[np.int64], limit: int) -> list[tuple[int, int, NDArray[np.int64]]]:
    """Split pairs start[0]..start[-1] into runs of at most `limit`: (first expert, last + 1, offsets)."""
    total = int(start[-1])
    batches = []
    for low in range(0, total, limit):
        high = min(low + limit, total)
        first = int(np.searchsorted(start, low, side="right")) - 1
        last = int(np.searchsorted(start, high, side="left"))
        batches.append((first, last, np.clip(start[first : last + 1], low, high)))
    return batches


def _flat(
    lists: Sequence[NDArray[np.integer]], counts: Sequence[int], limit: int, name: str
) -> NDArray[np.int64]:
    """The numbers of all experts in one array, checked: as many of each as counts says, each below limit."""
    if [len(numbers) for numbers in lists] != counts:
        raise UsageError(f"an expert has not as many {name} as tokens")
    flat = np.concatenate(lists).astype(np.int64, copy=False)
    if flat.min() < 0 or flat.max() >= limit:
        raise UsageError(f"{name} {flat.min()} to {flat.max()}; expected 0 to {limit - 1}")
    return flat


def _check_out(out: NDArray, shape: tuple[int, ...]) -> None:
    flags = out.flags
    if out.dtype != np.float32 or out.shape != shape or not (flags.c_contiguous and flags.behaved):
        raise UsageError(
            f"out is {out.dtype}{out.shape}; expected writeable, C-contiguous, aligned float32 {shape}"
        )


def _in_order(x: F32) -> F32:
    """x as the kernels read it, itself if it can be."""
    flags = x.flags
    return x if flags.c_contiguous and flags.aligned else np.require(x, np.float32, ["C", "A"])


def _address(array: NDArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def refuse_damaged(experts: Sequence[ExpertRecords]) -> None:
    """Their output is not finite. Raises ModelFilesError if one of them has an MXFP4 scale byte 255."""
    scales, names = [], []
    for number, expert in enumerate(experts):
        for name, matrix in zip(("w1", "w2", "w3"), expert.matrices, strict=True):
            if matrix.is_mxfp4:
                scales.append(matrix.arrays[1])
                names.append(f"{name} scale of expert {number} of the call")
    _refuse_nan_scales(scales, names)


def _refuse_nan_scales(scales: Sequence[NDArray], names: Sequence[str]) -> None:
    """The result holds NaN or infinity: an error if a scale byte is the reason, else the arithmetic's own."""
    for scale, name in zip(scales, names, strict=True):
        if scale.max(initial=0) == _SCALE_NAN:
            row, group = np.argwhere(scale == _SCALE_NAN)[0]
            raise ModelFilesError(
                f"MXFP4 scale byte 255 (NaN) in {name} at row {row}, group {group}; expected 0 to 254: "
                "the file is damaged"
            )


@functools.cache
def load_library() -> ctypes.CDLL:
    """The shared library, its functions typed. Raises ResourceError when it is not there or not current."""
    if os.name == "nt":
        raise ResourceError("the CPU kernels in C are not built on Windows; numpy and MLX compute instead")
    path = cpu_build.LIBRARY
    remedy = "run `python scripts/build_cpu.py` in a checkout, or `pip install` with a C compiler present"
    if not path.is_file():
        raise ResourceError(f"the CPU kernels are not built ({path} does not exist); {remedy}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ResourceError(f"the CPU kernels cannot be loaded: {error}; {remedy}") from error
    library.k3_source_id.restype = ctypes.c_char_p
    built, sources = library.k3_source_id().decode(), cpu_build.source_id()
    if built != sources:
        raise ResourceError(
            f"the CPU kernels were built from other sources ({built}, not {sources}); {remedy}"
        )
    for function, (result, *arguments) in _signatures().items():
        entry = getattr(library, function)
        entry.restype, entry.argtypes = result, arguments
    if RECORD.itemsize != library.k3_matrix_size():
        raise ResourceError(f"the CPU kernels describe matrices differently from this package; {remedy}")
    return library


def _signatures() -> dict[str, list[Any]]:
    """Result and argument types of the library's functions, in the order of api.c and sequence.c."""
    pointer, number, size, single = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    experts = [pointer, size, *[pointer] * 4]  # matrices, experts, start, token, row, weight
    return {
        "k3_isa_named": [pointer, ctypes.c_char_p],
        "k3_matmul": [number, pointer, number, pointer, size, pointer, size, size, pointer],
        "k3_experts_mix": [
            *(number, pointer, number, *experts, pointer, size, size),
            *(single, single, pointer, size),
        ],
        "k3_read": [ctypes.c_uint64, pointer, number, pointer, size],
        "k3_sequence": [number, pointer, number, pointer, size, pointer],
    }
