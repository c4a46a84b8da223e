"""Output of system commands, as their manual pages and published transcripts show it, to facts."""

from __future__ import annotations

import os
import sys

import pytest

from k3mlx.doctor.disks import file_system
from k3mlx.doctor.outputs import (
    Mount,
    Process,
    mount_of,
    output,
    parse_cpuinfo,
    parse_mac_mounts,
    parse_mounts,
    parse_ps,
    parse_swap,
    parse_sysctl,
)

SYSCTL = """\
machdep.cpu.brand_string: Apple M4 Max
hw.perflevel0.physicalcpu: 10
hw.perflevel1.physicalcpu: 4
sysctl.proc_translated: 0
iogpu.wired_limit_mb: 0
vm.swapusage: total = 3072.00M  used = 1821.25M  free = 1250.75M  (encrypted)
"""
PS = """\
    1    21504 /sbin/launchd
  512  8388608 /Applications/Big Program.app/Contents/MacOS/Big Program
  600     1024 (zombie)
"""
MAC_MOUNT = """\
/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
devfs on /dev (devfs, local, nobrowse)
/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled, nobrowse, protect)
/dev/disk5s1 on /Volumes/Fast (SSD) 2 (apfs, local, nodev, nosuid, journaled, noowners)
//me@server/share on /Volumes/share (smbfs, nodev, nosuid, mounted by me)
"""
MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /dev/shm rw - tmpfs tmpfs rw,size=24g
41 22 8:1 / /media/my\\040disk rw shared:9 master:2 - xfs /dev/sda1 rw
42 41 0:40 / /media/my\\040disk rw - tmpfs none rw
"""


def test_sysctl_of_macos() -> None:
    found = parse_sysctl(SYSCTL)
    assert found["machdep.cpu.brand_string"] == "Apple M4 Max"
    assert found["hw.perflevel0.physicalcpu"] == "10"
    assert parse_swap(found["vm.swapusage"]) == (3072 * 2**20, int(1821.25 * 2**20))
    assert parse_sysctl("") == {}
    assert parse_swap("") is None
    assert parse_swap("total = 2,00G  used = 0,00M") == (2 << 30, 0)  # a decimal comma


def test_ps_of_macos() -> None:
    assert parse_ps(PS) == [
        Process(1, "launchd", 21504 << 10),
        Process(512, "Big Program", 8388608 << 10),
        Process(600, "(zombie)", 1 << 20),
    ]
    assert parse_ps("PID RSS COMM\n\n12 x y\n") == []


def test_mounts() -> None:
    mounts = parse_mounts(MOUNTINFO)
    assert mounts[0] == Mount("/", "ext4")
    assert mount_of("/dev/shm/x", mounts) == Mount("/dev/shm", "tmpfs")
    assert mount_of("/dev/shmx", mounts) == Mount("/", "ext4")
    assert mount_of("/media/my disk", mounts) == Mount("/media/my disk", "tmpfs")  # mounted over the other
    assert mount_of("/x", []) is None


def test_mounts_of_macos() -> None:
    mounts = parse_mac_mounts(MAC_MOUNT)
    assert mount_of("/Volumes/share/k3", mounts) == Mount("/Volumes/share", "smbfs")
    assert mount_of("/Volumes/Fast (SSD) 2/k3", mounts) == Mount("/Volumes/Fast (SSD) 2", "apfs")
    assert mount_of("/Users/me", mounts) == Mount("/", "apfs")


def test_processor() -> None:
    assert parse_cpuinfo("processor\t: 0\nmodel name\t: A Chip (R)  9\nmodel name\t: B\n") == "A Chip (R)  9"
    assert parse_cpuinfo("processor\t: 0\nBogoMIPS\t: 50.00\n") is None


def test_a_command_that_is_not_there() -> None:
    assert output("/no/such/command") == ""
    assert output(sys.executable, "-c", "print('said')") == "said\n"


@pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="reads /proc/self/mountinfo")
def test_this_machine(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert file_system(tmp_path)
    assert file_system("/proc") == "proc"  # type: ignore[arg-type]
