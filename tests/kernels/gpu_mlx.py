"""Judge c through MLX itself: every case of sizes.py by `mx.fast.cuda_kernel`, or `metal_kernel` on a Mac.

    python -m tests.kernels.gpu_mlx              every case, and T = 1000 at full width
    python -m tests.kernels.gpu_mlx --part 2/4   the second of four parts: compiling takes most of the time

A threadgroup size that the device refuses is halved, as the self-test does. Exit code 0 if all passed, 1 if not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from k3mlx.kernels.cases import Case, launch_of
from k3mlx.kernels.launch import KERNELS
from k3mlx.kernels.mlx_maker import MlxMaker

from .sizes import CASES, gpu_cases
from .verdict import judge

SMALLEST = 128


class Runner:
    """Launches on the GPU of this mlx."""

    def __init__(self) -> None:
        self.maker = MlxMaker()
        self.built = {stem: self.maker.build(spec) for stem, spec in KERNELS.items()}
        self.halved = 0

    def __call__(self, case: Case) -> Sequence[np.ndarray]:
        while True:
            try:
                launch = launch_of(case, self.maker, lambda x, dtype: mx.array(x).astype(getattr(mx, dtype)))
                outputs = self.built[case.stem](**vars(launch), init_value=float("nan"))
                mx.eval(*outputs)
                break
            except RuntimeError:
                if case.threads <= SMALLEST:
                    raise
                case, self.halved = replace(case, threads=case.threads // 2), self.halved + 1
        wide = [o.astype(mx.float32) if o.dtype in (mx.bfloat16, mx.float16) else o for o in outputs]
        return [np.array(o) for o in wide]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", metavar="N/M", help="every M-th case from the N-th on")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="kernels")
    arguments = parser.parse_args()
    first, step = map(int, arguments.part.split("/"))
    cases = [
        case
        for case in itertools.chain(*(cases() for cases in CASES.values()), gpu_cases())
        if case.stem in arguments.only
    ]
    runner = Runner()
    print("device", runner.maker.name, mx.device_info().get("device_name", ""), "mlx", mx.__version__)
    wrong = judge(cases[first - 1 :: step], runner)
    print(f"{runner.halved} times the threads of a threadgroup were halved")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
