"""Free space: full and read-only disks, folders that are not there yet, and a snapshot on such a disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import k3mlx
from k3mlx.doctor.diagnosis import Options, diagnose
from k3mlx.doctor.disks import Disk, check_disks, look_at_disks
from k3mlx.doctor.findings import FATAL, OK, WARNING

from .facts import GB, write_model

DISK = Disk("model", Path("/models"), 60 * GB, 500 * GB, True, "ext4")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB of its own, with a model on it, in a folder whose name has a space and other letters."""
    folder = tmp_path / "my dïsk 盘"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        write_model(folder / "model")
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_line_for_each_disk() -> None:
    (line,) = check_disks([DISK])
    assert line.level == OK
    assert line.text == "model /models: 60 GB of 500 GB free, ext4"
    (line,) = check_disks([replace(DISK, free=5000)])
    assert line.level == WARNING
    assert "nothing can be downloaded" in line.text
    (line,) = check_disks([replace(DISK, free=0, writable=False)])
    assert line.level == OK
    assert "read-only" in line.text


def test_a_folder_that_is_not_there_yet_is_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    there, not_yet = look_at_disks([("a", tmp_path), ("b", tmp_path / "x" / "y")])
    assert not_yet.folder == tmp_path / "x" / "y"
    assert (there.total, there.kind, there.writable) == (not_yet.total, not_yet.kind, True)


def levels(folder: Path) -> dict[str, str]:
    """The level of each code about a model, the run of the shipped one left out."""
    return {finding.code: finding.level for finding in diagnose(Options(str(folder), "numpy", "cpu"))}


@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_snapshot_on_such_a_disk(small_disk: Path, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3mlx.doctor.trial.check_trial", lambda trial: [])
    monkeypatch.setattr("k3mlx.doctor.trial.run_trial", lambda backend, device: None)
    if state == "full":
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "filler").write_bytes(bytes(16 << 20))
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    before = sorted(os.listdir(small_disk / "model"))
    found = levels(small_disk / "model")
    assert FATAL not in found.values()
    assert found["census"] == found["files"] == found["vocabulary"] == OK
    assert found["disk"] == (WARNING if state == "full" else OK)
    with k3mlx.load(small_disk / "model", backend="numpy") as engine:
        assert np.isfinite(engine.session().feed([1, 2, 3])).all()
    assert sorted(os.listdir(small_disk / "model")) == before
