"""Free space and writability of the folders in question. Owns looking these up and the findings; writes nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3mlx.memory import format_size

from .findings import Finding, ok, warning
from .outputs import mount_of, output, parse_mac_mounts, parse_mounts

LITTLE = 1 << 30  # bytes free; less than a tenth of one shard


@dataclass(frozen=True)
class Disk:
    """A folder that is, or will be, written to: bytes free and in all, and the kind of file system if known."""

    role: str
    folder: Path
    free: int
    total: int
    writable: bool
    kind: str = ""


def look_at_disks(folders: Sequence[tuple[str, Path]]) -> list[Disk]:
    """The disks of some folders, each with what it is for."""
    return [disk for role, folder in folders if (disk := look_at_disk(role, folder))]


def look_at_disk(role: str, folder: Path) -> Disk | None:
    """The disk of a folder, or of the nearest folder above it that exists; None if it cannot be looked at."""
    there = _existing(folder)
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return None
    return Disk(role, folder, usage.free, usage.total, os.access(there, os.W_OK), file_system(there))


def check_disks(disks: Sequence[Disk]) -> Iterator[Finding]:
    """A line each. A full or read-only disk stops no run, only downloads and what is kept between runs."""
    for disk in disks:
        kind = f", {disk.kind}" if disk.kind else ""
        text = f"{disk.role} {disk.folder}: {format_size(disk.free)} of {format_size(disk.total)} free{kind}"
        if not disk.writable:
            yield ok("disk", f"{text}, read-only for this user: enough to run, not to download")
        elif disk.free < LITTLE:
            yield warning("disk", f"{text}: nothing can be downloaded or converted there", "free some space")
        else:
            yield ok("disk", text, data={"free": disk.free, "total": disk.total})


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, such as ext4; empty where the system does not list them."""
    try:
        if sys.platform == "darwin":
            mounts = parse_mac_mounts(output("/sbin/mount"))
        else:
            mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(errors="replace"))
    except OSError:
        return ""
    mount = mount_of(os.path.realpath(folder), mounts)
    return mount.kind if mount else ""
