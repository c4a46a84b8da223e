"""Fixtures of the CPU kernel tests: the library, each instruction set of this machine, arrays at odd addresses."""

import os

import numpy as np
import pytest

from k3mlx.errors import ResourceError
from k3mlx.kernels import cpu, cpu_build


def _isas() -> list[str]:
    try:
        return cpu.available_isas()
    except ResourceError as first:
        cpu.load_library.cache_clear()
        try:
            cpu_build.build()
            return cpu.available_isas()
        except (cpu_build.BuildError, ResourceError) as error:
            if os.environ.get("K3_REQUIRE_CPU_KERNELS") == "1":
                raise
            return [f"skip: {first}; {error}"]


@pytest.fixture(params=_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set that this machine can run."""
    if request.param.startswith("skip: "):
        pytest.skip(request.param)
    return request.param


@pytest.fixture
def kernels(isa: str) -> cpu.CpuKernels:
    """The kernels of an instruction set, on two threads."""
    return cpu.load_cpu_kernels(isa, threads=2)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(20)


def misaligned(array: np.ndarray, by: int = 1) -> np.ndarray:
    """A copy whose bytes start `by` bytes off an allocation's alignment; uint8 arrays only."""
    room = np.empty(array.nbytes + by, np.uint8)
    copy = room[by:].reshape(array.shape)
    copy[...] = array
    return copy
