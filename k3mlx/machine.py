"""What the operating system says of memory (how much could be had, how much this process has, pressure), and of
how busy the processors are.

Every query gives None or a neutral answer where the system cannot say. Decides nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import NamedTuple

WARN, CRITICAL = 1, 2  # levels of pressure; 0 is none

_FOOTPRINT, _LIFETIME_MAX_FOOTPRINT = 9, 30  # places in rusage_info_v4, in 64-bit words
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class Available(NamedTuple):
    """Bytes that could be had now without pushing anything out, the bytes of the machine, and who says so."""

    free: int
    total: int
    source: str


def available_memory() -> Available | None:
    """What this process could still take, within the machine and within its control group."""
    if sys.platform == "darwin":
        return _mac_available()
    if sys.platform == "win32":
        return _windows_available()
    fields = meminfo()
    if "MemAvailable" not in fields:
        return None
    found = Available(fields["MemAvailable"], fields["MemTotal"], "MemAvailable")
    limit = _cgroup_room(_PROC / "self" / "cgroup", _CGROUPS)
    if limit is not None and limit.free < found.free:
        return limit
    return found


def footprint() -> int | None:
    """Bytes of memory that this process has now: physical footprint on macOS, resident size elsewhere."""
    if sys.platform == "darwin":
        return _mac_footprint()
    try:
        pages = int((_PROC / "self" / "statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def pressure() -> int:
    """0, WARN or CRITICAL: how short of memory the machine, or this process's control group, is."""
    if sys.platform == "darwin":
        level = _sysctl("kern.memorystatus_vm_pressure_level", ctypes.c_int)
        return {2: WARN, 4: CRITICAL}.get(level or 1, 0)
    room = available_memory()
    if room is None:
        return 0
    if room.free < room.total // 50:
        return CRITICAL
    return WARN if room.free < room.total // 25 else 0


def busy_seconds() -> float | None:
    """Seconds that all processors together have been at work since the machine started, whoever for; what a host
    took from a virtual machine counts. None where the system does not tell."""
    if sys.platform == "darwin":
        return _mac_busy_seconds()
    try:
        line = (_PROC / "stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    if len(line) < 9 or line[0] != "cpu":
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, line[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def meminfo(path: Path = _PROC / "meminfo") -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    fields = {}
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            number = value.split()
            if number and number[0].isdecimal():
                fields[name] = int(number[0]) * 1024
    except OSError:
        return {}
    return fields


def _cgroup_room(membership: Path, root: Path) -> Available | None:
    """What is left under the tightest memory limit of this process's control groups, of either version."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    tightest: Available | None = None
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, limit, usage, inactive = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage, inactive = (
                root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
            )  # fmt: skip
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None and most < 1 << 60:
                free = most - max(0, used - _stat_field(folder / "memory.stat", inactive))
                if tightest is None or free < tightest.free:
                    tightest = Available(max(0, free), most, f"control group limit {folder / limit}")
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return tightest


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat_field(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            field, _, value = line.partition(" ")
            if field == name:
                return int(value)
    except (OSError, ValueError):
        return 0
    return 0


def _sysctl(name: str, kind: type[ctypes.c_int] | type[ctypes.c_uint64]) -> int | None:
    value = kind()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    system = ctypes.CDLL(None)
    if system.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        return None
    return int(value.value)


def _mac_available() -> Available | None:
    """Free, speculative, purgeable and file-backed pages: what the system can hand over without writing."""
    total, page = _sysctl("hw.memsize", ctypes.c_uint64), _sysctl("hw.pagesize", ctypes.c_uint64)
    names = ("vm.page_free_count", "vm.page_speculative_count", "vm.page_pageable_external_count",
             "vm.page_purgeable_count")  # fmt: skip
    counts = [_sysctl(name, ctypes.c_int) for name in names]
    if total is None or page is None or counts[0] is None:
        return None
    return Available(sum(count or 0 for count in counts) * page, total, "reclaimable pages")


def _mac_busy_seconds() -> float | None:
    """From host_statistics(HOST_CPU_LOAD_INFO): ticks of user, system, idle and nice, summed over processors."""
    system, ticks = ctypes.CDLL(None), (ctypes.c_uint32 * 4)()
    count = ctypes.c_uint32(4)
    system.mach_host_self.restype = ctypes.c_uint32
    arguments = ctypes.c_uint32(system.mach_host_self()), 3, ctypes.byref(ticks), ctypes.byref(count)
    if system.host_statistics(*arguments) != 0:
        return None
    return (ticks[0] + ticks[1] + ticks[3]) / os.sysconf("SC_CLK_TCK")


def mac_peak_footprint() -> int | None:
    """The largest physical footprint that this process has had, on macOS."""
    return _mac_usage(_LIFETIME_MAX_FOOTPRINT)


def _mac_footprint() -> int | None:
    return _mac_usage(_FOOTPRINT)


def _mac_usage(field: int) -> int | None:
    """A counter of proc_pid_rusage, which is where Activity Monitor has its figure of memory from."""
    fields = (ctypes.c_uint64 * 64)()  # rusage_info_v4: 16 bytes of uuid, then 64-bit counters
    if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 4, ctypes.byref(fields)) != 0:
        return None
    return int(fields[field])


def _windows_available() -> Available | None:
    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
            (name, ctypes.c_uint64)
            for name in ("total", "free", "page_total", "page_free", "total_v", "free_v", "extended")
        ]

    status = Status(length=ctypes.sizeof(Status))
    kernel32 = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined, unused-ignore]
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return Available(int(status.free), int(status.total), "available physical memory")
