"""An emulator of `mx.fast.metal_kernel` on the CPU that checks every memory access. Needs g++, binutils, numpy.

`Emulator().metal_kernel(...)` builds a kernel, and the result is called like MLX's. Arrays are `EmuArray`.
A `Finding` is raised for the first thing that is wrong with a launch.
"""

from .arrays import EmuArray, array
from .build import COMPILER, Finding
from .launcher import Emulator, EmulatorMaker

__all__ = ["COMPILER", "EmuArray", "Emulator", "EmulatorMaker", "Finding", "array"]
