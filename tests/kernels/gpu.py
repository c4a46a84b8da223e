"""Judge c: the kernel texts on an NVIDIA GPU, their results and their times. Needs CuPy.

    python -m tests.kernels.gpu             every case of sizes.py, and T = 1000 at full width
    python -m tests.kernels.gpu --bench     also times at the sizes of the released model
    python -m tests.kernels.gpu --code DIR  takes machine code from there where it is
                                            (python -m tests.kernels.precompile DIR makes it, without a GPU)

The compiler gets the text that MLX would give it on CUDA (cuda_text.py). Times are medians over replays of a
graph that holds one launch for each of several sets of buffers, so that a launch does not find its state in
the cache, as it would not between two tokens of a model with 69 such layers.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from k3mlx.kernels.cases import Case, launch_of

from .cuda_text import OPTIONS, code_name, cuda_text
from .emulator import Emulator, EmulatorMaker, array
from .emulator.arrays import DTYPES, EmuArray
from .sizes import CASES, bench_cases, gpu_cases
from .texts import generated
from .verdict import judge

POISON = 0xFF
_modules: dict[str, Any] = {}


@dataclass(frozen=True)
class Prepared:
    """A launch with its buffers on the device."""

    function: Any
    blocks: tuple[int, ...]
    threads: tuple[int, ...]
    buffers: tuple[Any, ...]
    outputs: tuple[tuple[Any, str], ...]

    def __call__(self) -> None:
        self.function(self.blocks, self.threads, self.buffers)


def _includes() -> tuple[str, ...]:
    roots = [os.environ.get("CUDA_PATH", "/usr/local/cuda"), "/usr/local/cuda"]
    folders = [Path(root) / "include" for root in roots]
    return tuple(
        f"-I{folder}"
        for base in folders
        if base.is_dir()
        for folder in (base, base / "cccl")
        if folder.is_dir()
    )


def function_of(case: Case, code_folder: Path | None) -> Any:
    """The kernel of a case on the device, from `code_folder` where it is there."""
    text = generated(case, cuda=True)
    source = cuda_text(text)
    if source not in _modules:
        ready = code_folder / code_name(source) if code_folder else None
        if ready and ready.is_file():
            module = cupy.RawModule(path=str(ready))
        else:
            module = cupy.RawModule(code=source, options=(*OPTIONS, *_includes()), backend="nvrtc")
        _modules[source] = module.get_function(text.name)
    return _modules[source]


def prepare(case: Case, code_folder: Path | None = None) -> Prepared:
    """Stepping down to half the threads where the registers of one multiprocessor would not suffice."""
    function = function_of(case, code_folder)
    while function.max_threads_per_block < case.threads:
        case = replace(case, threads=case.threads // 2)
        function = function_of(case, code_folder)
    launch = launch_of(case, EmulatorMaker(Emulator()), array)
    inputs = [cupy.asarray(np.ascontiguousarray(x.storage)) for x in launch.inputs]
    outputs = []
    for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True):
        storage = cupy.empty(shape, DTYPES[dtype][1])
        storage.reshape(-1).view(cupy.uint8)[:] = POISON
        outputs.append((storage, dtype))
    blocks = tuple(g // t for g, t in zip(launch.grid, launch.threadgroup, strict=True))
    buffers = (*inputs, *(storage for storage, _ in outputs))
    return Prepared(function, blocks, launch.threadgroup, buffers, tuple(outputs))


def run(case: Case, code_folder: Path | None = None) -> Sequence[np.ndarray]:
    prepared = prepare(case, code_folder)
    prepared()
    return [EmuArray(cupy.asnumpy(storage), dtype).values() for storage, dtype in prepared.outputs]


def graph_time(launches: Sequence[Any], replays: int = 30) -> float:
    """Seconds a launch takes: median replay of one graph of all of them."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for launch in launches:
            launch()
        stream.synchronize()
        stream.begin_capture()
        for launch in launches:
            launch()
        graph = stream.end_capture()
        times = []
        for _ in range(replays + 3):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end))
    return float(np.median(times[3:])) / len(launches) * 1e-3


def _copies(case: Case, count: int, code_folder: Path | None) -> list[Prepared]:
    first = prepare(case, code_folder)
    return [
        first,
        *(replace(first, buffers=tuple(b.copy() for b in first.buffers)) for _ in range(count - 1)),
    ]


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy on the device."""
    source = cupy.empty(1 << 32, cupy.uint8)
    target = cupy.empty_like(source)
    copy = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x", "k3_copy")
    wide = source.view(cupy.float32), target.view(cupy.float32)
    return 2 * source.nbytes / graph_time([lambda: copy(*wide)], 10)


def bench(code_folder: Path | None, stems: Sequence[str]) -> None:
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    print("device", properties["name"].decode())
    copy = copy_bandwidth()
    print(f"copy {copy / 1e12:.2f} TB/s counting both ways")
    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    print(f"launch floor in a graph {graph_time([lambda: nothing((1,), (32,), ())] * 64) * 1e6:.2f} us")
    for name, sets, threads, case in bench_cases():
        if case.stem not in stems:
            continue
        for count in threads:
            prepared = _copies(replace(case, threads=count), sets, code_folder)
            seconds = graph_time(prepared)
            moved = sum(b.nbytes for b in prepared[0].buffers)
            function = prepared[0].function
            print(
                f"{name:20} {prepared[0].threads[0]:5} threads {seconds * 1e6:10.2f} us"
                f"  {moved / seconds / copy:6.1%} of copy"
                f"  {function.num_regs} registers {function.local_size_bytes} local bytes",
                flush=True,
            )
            del prepared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", action="store_true", help="also time the kernels")
    parser.add_argument("--no-cases", action="store_true", help="time only")
    parser.add_argument("--code", type=Path, help="folder of machine code compiled before")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="kernels")
    arguments = parser.parse_args()
    start = time.monotonic()
    every = itertools.chain(*(cases() for cases in CASES.values()), gpu_cases())
    cases = [] if arguments.no_cases else [case for case in every if case.stem in arguments.only]
    wrong = judge(cases, lambda case: run(case, arguments.code))
    print(f"judged in {time.monotonic() - start:.0f} s")
    if arguments.bench:
        bench(arguments.code, arguments.only)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
