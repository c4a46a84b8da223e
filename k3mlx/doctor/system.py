"""The machine: Python, operating system, processor, memory, swap, what the GPU may wire, other processes.

Owns these facts, looking them up, and what is wrong with them.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3mlx import machine
from k3mlx.machine import Available
from k3mlx.memory import format_size

from .findings import Finding, fatal, ok, warning
from .outputs import Process, output, parse_cpuinfo, parse_ps, parse_swap, parse_sysctl

PYTHON_FROM = (3, 10)
MACOS_FROM = (14, 0)  # the oldest for which mlx is built
LARGE_SHARE = 10  # a process with more than one part in so many of memory is worth a line
SHOWN = 5  # processes
_SYSCTLS = (
    "machdep.cpu.brand_string hw.perflevel0.physicalcpu hw.perflevel1.physicalcpu sysctl.proc_translated"
    " iogpu.wired_limit_mb vm.swapusage"
).split()


@dataclass(frozen=True)
class System:
    """What the operating system says. cores: that this process may use; performance: of these, None if all are
    alike. swap: (total, used) bytes. wired_limit: megabytes, 0 is the system's own choice. None: not known."""

    python: tuple[int, ...]
    implementation: str
    bits: int
    platform: str  # sys.platform
    name: str
    architecture: str
    chip: str
    cores: int
    performance: int | None = None
    translated: bool = False
    macos: tuple[int, ...] = ()
    memory: Available | None = None
    pressure: int = 0
    swap: tuple[int, int] | None = None
    wired_limit: int | None = None
    processes: tuple[Process, ...] | None = None


def look_at_system() -> System:
    """The facts of this machine."""
    mac = parse_sysctl(output("/usr/sbin/sysctl", *_SYSCTLS)) if sys.platform == "darwin" else {}
    performance, limit = mac.get("hw.perflevel0.physicalcpu", ""), mac.get("iogpu.wired_limit_mb", "")
    return System(
        python=tuple(sys.version_info[:3]),
        implementation=platform.python_implementation(),
        bits=64 if sys.maxsize > 2**32 else 32,
        platform=sys.platform,
        name=_system_name(),
        architecture=platform.machine(),
        chip=mac.get("machdep.cpu.brand_string") or _chip(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        performance=int(performance) if performance.isdecimal() else None,
        translated=mac.get("sysctl.proc_translated") == "1",
        macos=tuple(int(n) for n in platform.mac_ver()[0].split(".") if n.isdecimal()),
        memory=machine.available_memory(),
        pressure=machine.pressure(),
        swap=parse_swap(mac.get("vm.swapusage", "")) if mac else _linux_swap(),
        wired_limit=int(limit) if limit.isdecimal() else None,
        processes=_processes(),
    )


def check_system(system: System) -> Iterator[Finding]:
    """Findings about everything that does not depend on a model or on packages."""
    yield _python(system)
    yield from _operating_system(system)
    yield from _memory(system)
    yield _others(system)


def _python(system: System) -> Finding:
    version = ".".join(map(str, system.python))
    text = f"Python {version} ({system.implementation}, {system.bits} bits)"
    if system.python < PYTHON_FROM or system.bits < 64:
        wanted = ".".join(map(str, PYTHON_FROM))
        return fatal("python", text, f"install a 64-bit Python {wanted} or later and make a new environment")
    return ok("python", text)


def _operating_system(system: System) -> Iterator[Finding]:
    cores = f"{system.cores} core{'s' if system.cores > 1 else ''}"
    if system.performance is not None:
        cores += f", {system.performance} of them performance cores"
    yield ok("system", f"{system.name}, {system.chip} ({system.architecture}), {cores}")
    if system.translated:
        yield warning(
            "translated",
            "this Python is an Intel one, translated by Rosetta: neither MLX nor the C kernels run at speed",
            "make the environment with an arm64 Python",
        )
    if system.macos and system.macos < MACOS_FROM:
        found, wanted = (".".join(map(str, version)) for version in (system.macos, MACOS_FROM))
        yield warning("macos", f"macOS {found}: mlx is built for {wanted} and later", "update macOS")


def _memory(system: System) -> Iterator[Finding]:
    room = system.memory
    if room is None:
        yield warning("free-memory", "the system does not say how much memory there is", "give --memory SIZE")
    else:
        text = f"{format_size(room.free)} of {format_size(room.total)} could be had ({room.source})"
        if system.pressure:
            yield warning("free-memory", f"{text}; memory is short", "close other programs, or give --memory")
        else:
            yield ok("free-memory", text, data={"free": room.free, "total": room.total})
    if system.swap is not None:
        total, used = system.swap
        text = f"swap: {format_size(used)} of {format_size(total)} in use" if total else "no swap"
        if room is not None and used > room.total // LARGE_SHARE:
            yield warning("swap", f"{text}: programs hold more than fits", "close programs, or restart")
        else:
            yield ok("swap", text)
    if system.wired_limit is not None:
        megabytes = system.wired_limit
        limit = format_size(megabytes << 20) if megabytes else "the system's own choice"
        how = "to raise it until the next restart: sudo sysctl iogpu.wired_limit_mb=MEGABYTES"
        yield ok("wired-limit", f"the GPU may wire {limit} (iogpu.wired_limit_mb={megabytes}); {how}")


def _others(system: System) -> Finding:
    if system.processes is None:
        return ok("processes", f"other processes are not looked at on {system.platform}")
    largest = sorted(system.processes, key=lambda process: -process.resident)[:SHOWN]
    lines = [f"{p.pid} {p.name} {format_size(p.resident)}" for p in largest]
    least = system.memory.total // LARGE_SHARE if system.memory else 1 << 30
    large = sum(process.resident > least for process in largest)
    if large:
        return warning(
            "processes", f"large processes beside this one: {', '.join(lines[:large])}",
            "close what is not needed: its memory could hold experts", lines,
        )  # fmt: skip
    return ok("processes", f"no other process has more than {format_size(least)}", lines)


def _system_name() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {platform.system()} {platform.release()}"
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _chip() -> str:
    try:
        name = parse_cpuinfo(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        name = None
    return name or platform.processor() or platform.machine()


def _linux_swap() -> tuple[int, int] | None:
    fields = machine.meminfo()
    if "SwapTotal" not in fields:
        return None
    return fields["SwapTotal"], fields["SwapTotal"] - fields.get("SwapFree", 0)


def _processes() -> tuple[Process, ...] | None:
    """Every other process that can be seen, None where that is not looked at."""
    if sys.platform == "darwin":
        found: Sequence[Process] = parse_ps(output("/bin/ps", "-axo", "pid=,rss=,comm="))
    elif Path("/proc/self/statm").exists():
        found = list(_proc())
    else:
        return None
    return tuple(process for process in found if process.pid != os.getpid())


def _proc() -> Iterator[Process]:
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                pages = int((entry / "statm").read_bytes().split()[1])
                name = (entry / "comm").read_text(errors="replace").strip()
            except (OSError, ValueError, IndexError):
                continue  # it has ended
            yield Process(int(entry.name), name, pages * page)
