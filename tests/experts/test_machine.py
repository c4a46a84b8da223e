"""What is read from /proc and control groups, on files of known content."""

import sys

import pytest

from k3mlx import machine

GB = 10**9


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text))


def test_the_tightest_limit_of_version_2(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/user/session\n")
    root = tmp_path / "fs"
    write(
        root / "user", memory__max=8 * GB, memory__current=5 * GB, memory__stat="anon 1\ninactive_file 1000\n"
    )
    write(root / "user" / "session", memory__max="max", memory__current=2 * GB)
    room = machine._cgroup_room(membership, root)
    assert room[:2] == (3 * GB + 1000, 8 * GB)
    assert "user/memory.max" in room.source


def test_version_1_and_no_limit(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("5:devices:/\n4:memory:/box\n0::/\n")
    root = tmp_path / "fs"
    huge = 9223372036854771712
    write(root / "memory" / "box", memory__limit_in_bytes=huge, memory__usage_in_bytes=GB)
    assert machine._cgroup_room(membership, root) is None
    write(root / "memory" / "box", memory__limit_in_bytes=4 * GB, memory__usage_in_bytes=GB,
          memory__stat="total_inactive_file 7\n")  # fmt: skip
    assert machine._cgroup_room(membership, root)[:2] == (3 * GB + 7, 4 * GB)
    assert machine._cgroup_room(tmp_path / "none", root) is None


def test_a_group_over_its_limit_has_no_room(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/\n")
    write(tmp_path / "fs", memory__max=GB, memory__current=2 * GB)
    assert machine._cgroup_room(membership, tmp_path / "fs").free == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_this_machine():
    room = machine.available_memory()
    assert 0 < room.free <= room.total
    before = machine.footprint()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert machine.footprint() - before > 60 << 20
    assert machine.pressure() in (0, machine.WARN, machine.CRITICAL)


@pytest.mark.parametrize(("free", "level"), [(100, 0), (39, 1), (19, 2)])
def test_levels_of_pressure(monkeypatch, free, level):
    if sys.platform == "darwin":
        pytest.skip("macOS has levels of its own")
    monkeypatch.setattr(machine, "available_memory", lambda: machine.Available(free, 1000, "a test"))
    assert machine.pressure() == level
