"""The worst errors of many cases, printed: what judges c by CuPy and by MLX both report."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from k3mlx.kernels.cases import Case, failures


def judge(cases: Iterable[Case], run: Callable[[Case], Sequence[np.ndarray]]) -> int:
    """Run every case, print what failed and the worst of each output; the number of failures."""
    wrong = count = 0
    worst: dict[tuple[str, str, str, str], float] = collections.defaultdict(float)
    for case in cases:
        checks = case.judge(run(case))
        count += 1
        for check in checks:
            key = (case.stem, case.dtype, check.output, check.measure)
            worst[key] = max(worst[key], check.error)
        for line in failures(checks):
            wrong += 1
            print(f"FAILED {case.stem} {case.label} {case.dtype} {case.threads}: {line}", flush=True)
    for (stem, dtype, output, measure), error in sorted(worst.items()):
        print(f"{stem:13} {dtype:9} {output:12} {measure:18} worst {error:.3g}")
    print(f"{count} cases, {wrong} failed")
    return wrong
