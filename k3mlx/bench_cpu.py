"""Measures the CPU kernels: products and fused experts at the released sizes, beside reading the same bytes, numpy
and, where it is installed, mlx.

Owns the cases, the timing and the table of `k3mlx bench --cpu`. All competitors run in turn, round after round, so
that a busy machine hits all of them; a row holds medians over the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from k3mlx.kernels.cpu import CpuKernels, load_cpu_kernels
from k3mlx.kernels.cpu_matrix import ExpertRecords, Matrix

LATENT, INNER = 3584, 3072  # the routed experts of Kimi K3
DENSE_IN, DENSE_OUT = 7168, 3072  # a slice of its attention projections
BETA, LINEAR_BETA = 4.0, 25.0
WORKING_SET = 160 << 20  # bytes of weights a case goes through, more than a cache holds
TOKENS = (1, 2, 4, 16, 512)
_MANY = 64  # from this many tokens on, two matrices suffice: the products are bound by arithmetic


@dataclass(frozen=True)
class Row:
    """One case: `seconds` is the median of a pass over `bytes` of weights for `tokens` tokens; `ratio_to_read`
    is its rate over the rate at which the same number of bytes is read, `multiply_adds` what it computes."""

    op: str
    tokens: int
    seconds: float
    bytes: int
    ratio_to_read: float
    multiply_adds: int


@dataclass(frozen=True)
class Case:
    """Something to time: `run` passes once over `bytes` of weights."""

    op: str
    tokens: int
    bytes: int
    multiply_adds: int
    run: Callable[[], object]


def measure(
    kernels: CpuKernels, rounds: int = 5, tokens: Sequence[int] = TOKENS, mlx: bool = True
) -> list[Row]:
    """Time every case `rounds` times. The first row is the read of the working set."""
    rng = np.random.default_rng(0)
    buffer = rng.integers(0, 1 << 16, WORKING_SET // 2, dtype=np.uint16)
    cases = [Case("read", 0, buffer.nbytes, 0, lambda: kernels.read(buffer))]
    cases += _expert_cases(kernels, rng, tokens)
    cases += _dense_cases(kernels, rng, tokens)
    cases += _numpy_cases(rng, [t for t in tokens if t >= _MANY])
    if mlx and importlib.util.find_spec("mlx") is not None:
        cases += _mlx_cases(rng)
    seconds: list[list[float]] = [[] for _ in cases]
    for number in range(rounds + 1):
        for case, taken in zip(cases, seconds, strict=True):
            started = perf_counter()
            case.run()
            if number:  # the first round touches the memory
                taken.append(perf_counter() - started)
    middle = [median(taken) for taken in seconds]
    read_rate = cases[0].bytes / middle[0]
    return [
        Row(case.op, case.tokens, took, case.bytes, case.bytes / took / read_rate, case.multiply_adds)
        for case, took in zip(cases, middle, strict=True)
    ]


def table(rows: Sequence[Row], kernels: CpuKernels) -> str:
    """The rows for a reader: milliseconds, GB/s of weights, their share of the read rate, GFLOP/s."""
    lines = [kernels.describe(), f"{'op':<28}{'tokens':>7}{'ms':>10}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}"]
    for row in rows:
        rate, flops = row.bytes / row.seconds / 1e9, 2 * row.multiply_adds / row.seconds / 1e9
        lines.append(
            f"{row.op:<28}{row.tokens or '':>7}{1e3 * row.seconds:>10.2f}{rate:>8.2f}{row.ratio_to_read:>9.2f}"
            f"{flops or 0:>9.0f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m k3mlx.bench_cpu`: print the table, or with --json one object with `rows`."""
    parser = argparse.ArgumentParser(prog="k3mlx.bench_cpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timings of each case (default 5)")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="tokens of a call")
    parser.add_argument(
        "--cpu-threads", type=int, default=None, help="default: OMP_NUM_THREADS, else the cores"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    kernels = load_cpu_kernels(threads=options.cpu_threads)
    rows = measure(kernels, options.rounds, options.tokens)
    if options.json:
        report = {"isa": kernels.isa, "threads": kernels.threads, "rows": [asdict(row) for row in rows]}
        print(json.dumps(report))
    else:
        print(table(rows, kernels))
    return 0


def _expert_cases(kernels: CpuKernels, rng: np.random.Generator, tokens: Sequence[int]) -> list[Case]:
    shapes = ((INNER, LATENT), (LATENT, INNER), (INNER, LATENT))
    size = sum(rows * cols * 17 // 32 for rows, cols in shapes)
    experts = [
        ExpertRecords.of([Matrix.mxfp4(*_random_mxfp4(rng, *shape)) for shape in shapes])
        for _ in range(WORKING_SET // size)
    ]
    cases = []
    for count in tokens:
        used = experts if count < _MANY else experts[:2]
        x = rng.standard_normal((count, LATENT), dtype=np.float32) * np.float32(LATENT**-0.5)
        every, ones = [np.arange(count)] * len(used), [np.ones(count, np.float32)] * len(used)

        def run(x: NDArray = x, used: list = used, every: list = every, ones: list = ones) -> object:
            return kernels.experts_mix(x, used, every, ones, BETA, LINEAR_BETA)

        work = count * len(used) * 3 * LATENT * INNER
        cases.append(Case("mxfp4 experts", count, size * len(used), work, run))
    return cases


def _dense_cases(kernels: CpuKernels, rng: np.random.Generator, tokens: Sequence[int]) -> list[Case]:
    cases = []
    for op, make in (("mxfp4", _mxfp4), ("int4", _int4), ("int8", _int8), ("bf16", _bf16)):
        first = make(rng)
        matrices = [first, *(make(rng) for _ in range(1, -(-WORKING_SET // first.nbytes)))]
        for count in tokens:
            used = matrices if count < _MANY else matrices[:2]
            x = rng.standard_normal((count, DENSE_IN), dtype=np.float32)
            out = np.empty((count, DENSE_OUT), np.float32)

            def run(x: NDArray = x, out: NDArray = out, used: list[Matrix] = used) -> None:
                for matrix in used:
                    kernels.matmul(x, matrix, out)

            work = count * len(used) * DENSE_IN * DENSE_OUT
            cases.append(Case(op, count, sum(m.nbytes for m in used), work, run))
    return cases


def _numpy_cases(rng: np.random.Generator, tokens: Sequence[int]) -> list[Case]:
    weight = rng.standard_normal((DENSE_OUT, DENSE_IN), dtype=np.float32)
    cases = []
    for count in tokens:
        x = rng.standard_normal((count, DENSE_IN), dtype=np.float32)
        out = np.empty((count, DENSE_OUT), np.float32)

        def run(x: NDArray = x, out: NDArray = out) -> object:
            return np.matmul(x, weight.T, out=out)

        cases.append(Case("numpy sgemm", count, weight.nbytes, count * weight.size, run))
    return cases


def _mlx_cases(rng: np.random.Generator) -> list[Case]:
    """mlx's quantized_matmul in float32 for one token, the matrices dealt to two CPU streams."""
    import mlx.core as mx

    streams = [mx.new_stream(mx.cpu) for _ in range(2)]
    x = mx.array(rng.standard_normal((1, DENSE_IN), dtype=np.float32))
    cases = []
    for op, make in (("mxfp4", _mxfp4), ("int4", _int4), ("int8", _int8)):
        arrays = [_as_mlx(make(rng)) for _ in range(4)]
        mx.eval(arrays, x)

        def run(arrays: list = arrays) -> None:
            done = []
            for number, (weight, scales, biases, mode, bits, group) in enumerate(arrays):
                with mx.stream(streams[number % 2]):
                    done.append(mx.quantized_matmul(x, weight, scales, biases, True, group, bits, mode=mode))
            mx.eval(done)

        size = sum(array.nbytes for one in arrays for array in one[:3] if array is not None)
        cases.append(Case(f"mlx {op}, 2 streams", 1, size, 4 * DENSE_IN * DENSE_OUT, run))
    return cases


def _as_mlx(matrix: Matrix) -> tuple:
    import mlx.core as mx

    packed, scales, *biases = (mx.array(array) for array in matrix.arrays)
    if matrix.is_mxfp4:
        return packed.view(mx.uint32), scales, None, "mxfp4", 4, 32
    bits = 32 * packed.shape[1] // DENSE_IN
    return packed, scales.astype(mx.float32), biases[0].astype(mx.float32), "affine", bits, 64


def _random_mxfp4(rng: np.random.Generator, rows: int, cols: int) -> tuple[NDArray, NDArray]:
    packed = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    return packed, rng.integers(0x70, 0x7B, (rows, cols // 32), dtype=np.uint8)


def _mxfp4(rng: np.random.Generator) -> Matrix:
    return Matrix.mxfp4(*_random_mxfp4(rng, DENSE_OUT, DENSE_IN))


def _affine(rng: np.random.Generator, bits: int) -> Matrix:
    packed = rng.integers(0, 1 << 32, (DENSE_OUT, DENSE_IN * bits // 32), dtype=np.uint32)
    scales, biases = (rng.standard_normal((DENSE_OUT, DENSE_IN // 64)).astype(np.float16) for _ in range(2))
    return Matrix.affine(packed, scales, biases, bits, 64)


def _int4(rng: np.random.Generator) -> Matrix:
    return _affine(rng, 4)


def _int8(rng: np.random.Generator) -> Matrix:
    return _affine(rng, 8)


def _bf16(rng: np.random.Generator) -> Matrix:
    return Matrix.dense(rng.integers(0x3C00, 0x4000, (DENSE_OUT, DENSE_IN), dtype=np.uint16))


if __name__ == "__main__":
    sys.exit(main())
