"""System commands, and their output and that of /proc, as text, to facts.

The formats of macOS are those of its manual pages; what parses them has not yet been run on a Mac.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_SWAP = re.compile(r"(total|used|free) = ([\d.,]+)([KMG])")


class Process(NamedTuple):
    """Another process: its id, name and resident bytes."""

    pid: int
    name: str
    resident: int


class Mount(NamedTuple):
    """A file system: where it is and its kind, such as ext4."""

    folder: str
    kind: str


def parse_sysctl(text: str) -> dict[str, str]:
    """`sysctl NAME ...` of macOS: lines `name: value`."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {name: value.strip() for name, colon, value in pairs if colon}


def parse_swap(text: str) -> tuple[int, int] | None:
    """(total, used) bytes of macOS's `vm.swapusage`: `total = 2048.00M  used = 1021.25M  free = ...`."""
    found = {name: int(float(n.replace(",", ".")) * _UNITS[unit]) for name, n, unit in _SWAP.findall(text)}
    return (found["total"], found["used"]) if {"total", "used"} <= found.keys() else None


def parse_ps(text: str) -> list[Process]:
    """`ps -axo pid=,rss=,comm=` of macOS, resident kilobytes, the command with its folder."""
    found = []
    for line in text.splitlines():
        fields = line.split(None, 2)
        if len(fields) == 3 and fields[0].isdecimal() and fields[1].isdecimal():
            found.append(Process(int(fields[0]), os.path.basename(fields[2].strip()), int(fields[1]) * 1024))
    return found


def parse_cpuinfo(text: str) -> str | None:
    """The name of the processor in /proc/cpuinfo, None where (as on most Arm machines) it has none."""
    match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def parse_mounts(text: str) -> list[Mount]:
    """/proc/self/mountinfo: the fifth field is the folder, what follows ` - ` the kind."""
    found = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split()
        if dash and len(fields) > 4 and after:
            folder = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
            found.append(Mount(folder, after.split()[0]))
    return found


def parse_mac_mounts(text: str) -> list[Mount]:
    """`mount` of macOS: `/dev/disk3s1s1 on / (apfs, sealed, local)`."""
    pattern = re.compile(r"^.+? on (/.*) \((\w+)[,)]", re.MULTILINE)
    return [Mount(folder, kind) for folder, kind in pattern.findall(text)]


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The file system that an absolute path without links is on: the deepest, of equals the last."""
    best = None
    for mount in mounts:
        inside = mount.folder == "/" or path == mount.folder or path.startswith(mount.folder + "/")
        if inside and (best is None or len(mount.folder) >= len(best.folder)):
            best = mount
    return best


def output(*command: str) -> str:
    """What a system command prints, empty if it cannot be run; names that it does not know are left out by it."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
