"""Byte counts: sizes as users write them, and what the operating system says of this process."""

from __future__ import annotations

import re
import sys

from .errors import UsageError
from .machine import mac_peak_footprint

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_size(value: int | str, name: str) -> int:
    """Bytes of `40GB`, `512MiB`, `1.5 G` or a plain number. Raises UsageError naming the option."""
    match = _SIZE.fullmatch(str(value))
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{name} is {value!r}, expected a size such as 40GB, 512MiB or a number of bytes")
    return round(float(match[1]) * _UNITS[match[2].lower()])


def format_size(count: int) -> str:
    """`17.5 MB`: decimal units, three digits or so."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}" if size < 99.5 else f"{size:.0f} {unit}"


def peak_memory_bytes() -> int:
    """The largest memory of this process so far: physical footprint on macOS, resident size elsewhere."""
    if sys.platform == "win32":
        return _windows_peak()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (mac_peak_footprint() or peak) if sys.platform == "darwin" else peak * 1024


def _windows_peak() -> int:
    import ctypes
    from ctypes import wintypes

    class Counters(ctypes.Structure):
        _fields_ = [("cb", wintypes.DWORD), ("page_faults", wintypes.DWORD)] + [
            (name, ctypes.c_size_t)
            for name in ("peak", "now", "qp_paged", "q_paged", "qp_non", "q_non", "pagefile", "peak_pagefile")
        ]

    counters = Counters()
    counters.cb = ctypes.sizeof(counters)
    kernel32 = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined, unused-ignore]
    kernel32.GetCurrentProcess.restype = wintypes.HANDLE
    query = kernel32.K32GetProcessMemoryInfo
    query.argtypes = [wintypes.HANDLE, ctypes.POINTER(Counters), wintypes.DWORD]
    if not query(kernel32.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
        return 0
    return int(counters.peak)
