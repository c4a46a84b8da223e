"""The GPU kernels at the released model's sizes, beside a plain copy of memory: bytes, operations and time.

Through MLX on whichever device there is: on a GPU the kernels, on the CPU the plain MLX operations that stand behind
them. Many launches are evaluated at once, each on arrays of its own, so that neither the wait for the host nor a
cache is measured. Owns the cases and their counts of bytes and operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import mlx.core as mx

from k3mlx.kernels.cases import Case, attn_res_case, kda_case, launch_of, route_case, run_plain
from k3mlx.kernels.launch import KERNELS
from k3mlx.kernels.mlx_maker import MlxMaker
from k3mlx.selftest import gate

from .result import Figure

HEADS, WIDTH, BLOCKS = 96, 128, 8
COPIED = {"cpu": 1 << 28, "metal": 1 << 29, "cuda": 1 << 30}  # bytes, more than caches hold
LAUNCHES = 16  # evaluated at once of what takes little


@dataclass(frozen=True)
class Point:
    """One kernel of a roofline. nbytes: inputs and outputs, each once. operations: multiplications and additions."""

    name: str
    path: str
    nbytes: int
    operations: int
    figure: Figure  # ms of one launch

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.figure.median * 1e3

    def as_dict(self, rate: float) -> dict[str, Any]:
        """For JSON; `rate` is the measured one of memory."""
        return {
            "name": self.name,
            "path": self.path,
            "bytes": self.nbytes,
            "operations": self.operations,
            "ms": self.figure.median,
            "of_memory_rate": self.bytes_per_second / rate,
        }


def measure_kernels(device: str, repeats: int) -> tuple[float, list[Point], list[str]]:
    """(bytes a second of a copy, counting both ways; a point a case; lines on kernels that were not run).

    device: metal, cuda or mlx-cpu, as `selftest.find_device` gives it. Kernels that fail their self-test are left out.
    """
    kind = "cpu" if device == "mlx-cpu" else device
    with mx.stream(mx.cpu if kind == "cpu" else mx.gpu):
        rate = copy_rate(COPIED[kind], repeats)
        if kind == "cpu":
            return (
                rate,
                [_point(case, "plain", 2, _plain(case), repeats) for case in cases(512, "float32")],
                [],
            )
        verdict = gate(kind)
        maker = MlxMaker(kind)
        built = {stem: maker.build(spec) for stem, spec in KERNELS.items() if stem not in verdict.disabled}
        points = []
        for case in cases(2048, "bfloat16"):
            if case.stem in built:
                sized = replace(case, threads=verdict.threads.get(case.stem, KERNELS[case.stem].threads))
                count = LAUNCHES if tokens_of(case) < 64 else 1
                points.append(
                    _point(sized, "kernel", count, _launched(sized, maker, built[case.stem]), repeats)
                )
    return rate, points, [f"{stem} was not run: {why}" for stem, why in verdict.disabled.items()]


def cases(longest: int, dtype: str) -> Iterator[Case]:
    """Each kernel for one token and, where it takes many, for `longest`."""
    yield kda_case("kda_step", heads=HEADS, dtype=dtype)
    yield kda_case("kda_prefill", heads=HEADS, tokens=longest, dtype=dtype)
    for tokens in (1, longest):
        yield attn_res_case(frozen=BLOCKS, tokens=tokens, dtype=dtype)
        yield route_case(tokens=tokens)


def copy_rate(nbytes: int, repeats: int) -> float:
    """Bytes read and written a second by one operation over a large array: the best of the repeats."""
    x = mx.zeros(nbytes // 4, mx.float32)
    mx.eval(x)
    best = 0.0
    for _ in range(repeats + 1):
        started = perf_counter()
        y = x + 1
        mx.eval(y)
        best = max(best, 2 * nbytes / (perf_counter() - started))
    return best


def tokens_of(case: Case) -> int:
    """How many tokens a case is for."""
    shape = case.arguments[1 if case.stem == "attn_res_mix" else 0].shape
    return int(shape[1] if case.stem.startswith("kda") else shape[0])


def operations_of(case: Case) -> int:
    """Multiplications and additions, without those of norms and activations.

    KDA: decay, read with k, correction and read with q are 7 operations a number of state and token (§2.3.5 of the
    model specification). Depth mix: scores, norms and sum, 6 a number of a source (§2.2). Router: 4 a score.
    """
    tokens = tokens_of(case)
    if case.stem.startswith("kda"):
        return 7 * tokens * case.arguments[7].size
    if case.stem == "attn_res_mix":
        return 6 * (BLOCKS + 1) * case.arguments[1].size
    return 4 * case.arguments[0].size


Launch = Callable[[], list[Any]]  # builds one launch on arrays of its own, lazily


def _point(case: Case, path: str, count: int, make: Callable[[], Launch], repeats: int) -> Point:
    launches = [make() for _ in range(count)]
    values = []
    for number in range(repeats + 1):
        started = perf_counter()
        outputs = [launch() for launch in launches]
        mx.eval(outputs)
        if number:  # the first one compiles
            values.append(1e3 * (perf_counter() - started) / count)
    nbytes = _bytes(case) + sum(array.nbytes for array in outputs[0])
    name = f"{case.stem} T{tokens_of(case)}"
    return Point(name, path, nbytes, operations_of(case), Figure("ms", tuple(values)))


def _launched(case: Case, maker: MlxMaker, kernel: Any) -> Callable[[], Launch]:
    def make() -> Launch:
        launch = launch_of(case, maker, _fresh)
        mx.eval(launch.inputs)
        return lambda: kernel(**vars(launch))

    return make


def _plain(case: Case) -> Callable[[], Launch]:
    def make() -> Launch:
        arrays: dict[int, mx.array] = {}

        def kept(x: Any, dtype: str) -> mx.array:
            if id(x) not in arrays:
                arrays[id(x)] = _fresh(x, dtype)
                mx.eval(arrays[id(x)])
            return arrays[id(x)]

        return lambda: list(run_plain(case, kept))

    return make


def _fresh(x: Any, dtype: str) -> mx.array:
    return mx.array(x).astype(getattr(mx, dtype))


def _bytes(case: Case) -> int:
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    pairs = zip(case.arguments, case.dtypes, strict=True)
    return sum(array.size * sizes[dtype] for array, dtype in pairs if dtype is not None)
