"""Macs to plan for, with the rates of their disks: stated assumptions, to be replaced by `--disk-gbps`."""

from __future__ import annotations

from typing import NamedTuple

GIB = 1 << 30
SYSTEM_BYTES = 6 * GIB  # that macOS keeps of a Mac that does nothing else, or a tenth if that is more


class Mac(NamedTuple):
    """A chip, its memory, and bytes a second of its internal SSD in large parallel reads.

    exactly: `memory` is what the engine may use, not what was sold.
    """

    chip: str
    memory: int
    disk_rate: float
    exactly: bool = False

    @property
    def name(self) -> str:
        if self.exactly:
            return f"a Mac that gives {self.memory / 1e9:g} GB"
        return f"{self.chip} {self.memory // GIB} GB"


BASIS = (
    "memory as sold, less a tenth and at least 6 GiB for macOS;"
    " rates of internal SSDs of 1 TB or more in large parallel reads"
)
MACS = (
    Mac("M4", 32 * GIB, 3.0e9),
    Mac("M4 Pro", 48 * GIB, 6.0e9),
    Mac("M1 Max", 64 * GIB, 5.0e9),
    Mac("M5 Pro", 64 * GIB, 12.8e9),
    Mac("M3 Max", 96 * GIB, 6.0e9),
    Mac("M1 Ultra", 128 * GIB, 6.0e9),
    Mac("M4 Max", 128 * GIB, 7.0e9),
    Mac("M5 Max", 128 * GIB, 13.6e9),
    Mac("M2 Ultra", 192 * GIB, 6.0e9),
    Mac("M3 Ultra", 256 * GIB, 6.5e9),
    Mac("M3 Ultra", 512 * GIB, 6.5e9),
)
