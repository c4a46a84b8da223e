"""Runs a case of `k3mlx.kernels.cases` on the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from k3mlx.kernels import KERNELS
from k3mlx.kernels.cases import Case, failures, launch_of

from .emulator import COMPILER, Emulator, EmulatorMaker, array

needs_emulator = pytest.mark.skipif(
    not COMPILER, reason="the emulator needs g++ and binutils on x86-64 Linux; install them there"
)


@cache
def checked_maker() -> EmulatorMaker:
    return EmulatorMaker(Emulator())


def run(case: Case, maker: EmulatorMaker | None = None) -> Sequence[np.ndarray]:
    """The outputs of a case, as numbers; raises `Finding` for anything wrong with the launch."""
    maker = maker or checked_maker()
    launch = launch_of(case, maker, array)
    outputs = maker.build(KERNELS[case.stem])(
        inputs=launch.inputs,
        template=launch.template,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
    )
    return [output.values() for output in outputs]


def prove(case: Case, maker: EmulatorMaker | None = None) -> None:
    """Run and judge; an AssertionError names tensor, index, got, expected and tolerance."""
    wrong = failures(case.judge(run(case, maker)))
    assert not wrong, f"{case.stem} {case.label} {case.dtype} {case.threads} threads: " + " | ".join(wrong)
