"""The rate of a disk is one of bytes on the disk, or there is a reason in place of it."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.doctor import rate
from k3mlx.doctor.findings import OK
from k3mlx.doctor.rate import DiskRate, Rate, check_rate, measure
from k3mlx.doctor.residency import cached_share, on_disk
from k3mlx.errors import ModelFilesError
from k3mlx.experts.files import ExpertFiles, direct_supported
from k3mlx.experts.layout import ExpertLayout
from k3mlx.experts.probe import drop_cached

from .facts import write_model

THREADS, PER_TOKEN = 2, 3
needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the page cache as Linux has it"
)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpoint]:
    """24 experts on a disk, which are worth a measurement."""
    monkeypatch.setattr(rate, "PROBE_MIN_BYTES", 0)
    with Checkpoint.open(
        write_model(tmp_path / "ö m", num_experts=12, num_experts_per_token=PER_TOKEN)
    ) as opened:
        yield opened


def not_cached(path: Path, offset: int, nbytes: int) -> float:
    return 0.0


def measured(checkpoint: Checkpoint, share: rate.Share = not_cached, kind: str = "ext4") -> DiskRate:
    layout = ExpertLayout(checkpoint)
    return measure(
        layout, checkpoint.stamps, THREADS, PER_TOKEN, share, lambda folder: kind, random.Random(1)
    )


def test_both_ways_are_measured_on_different_experts(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, set[int]]] = []

    def read(files: ExpertFiles, batch: list, slot: int, threads: int) -> tuple[float, float]:  # type: ignore[type-arg]
        seen.append((files.direct, {id(placement) for placement in batch}))
        return 2e9, 1.0

    monkeypatch.setattr(rate, "read_rate", read)
    monkeypatch.setattr(rate, "direct_supported", lambda: True)
    found = measured(checkpoint)
    assert [direct for direct, _ in seen] == [True, False]
    assert not seen[0][1] & seen[1][1]
    layout = ExpertLayout(checkpoint)
    assert found.token_bytes == PER_TOKEN * len(layout.layers) * layout.payload
    line = check_rate(found)
    assert line.level == OK
    assert "2.00 GB/s direct" in line.text
    assert "2.00 GB/s through the page cache" in line.text


def test_a_rate_for_real(checkpoint: Checkpoint) -> None:
    found = measured(checkpoint)
    assert found.rates
    assert all(one.bytes_per_second > 0 for one in found.rates)
    assert found.rates[0].direct <= direct_supported()


def test_a_quick_disk_is_given_more_to_read(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def read(files: ExpertFiles, batch: list, slot: int, threads: int) -> tuple[float, float]:  # type: ignore[type-arg]
        sizes.append(len(batch))
        return 2e9, 0.01

    monkeypatch.setattr(rate, "read_rate", read)
    measured(checkpoint)
    assert sizes == [8, 16]


def test_small_models_are_not_measured(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "PROBE_MIN_BYTES", 1 << 30)
    line = check_rate(measured(checkpoint))
    assert line.level == OK
    assert "not measured: all experts together" in line.text


def test_a_file_system_without_direct_reads_is_measured_through_the_cache(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(files: ExpertFiles, batch: list, slot: int, threads: int) -> tuple[float, float]:  # type: ignore[type-arg]
        if files.direct:
            raise ModelFilesError("cannot be opened (Invalid argument)")
        return 1e9, 1.0

    monkeypatch.setattr(rate, "read_rate", read)
    monkeypatch.setattr(rate, "direct_supported", lambda: True)
    assert measured(checkpoint).rates == (Rate(False, 1e9, 10**9, THREADS),)


def test_a_damaged_disk_is_an_error_not_a_missing_feature(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: object) -> tuple[float, float]:
        raise ModelFilesError("m.safetensors: reading 9 bytes at 0 failed (Input/output error)")

    monkeypatch.setattr(rate, "read_rate", read)
    assert "Input/output error" in measured(checkpoint).error


@pytest.mark.parametrize(
    ("share", "kind", "words"),
    [
        (0.5, "tmpfs", "in memory and the file system does not let them go"),
        (None, "ext4", "does not tell this user"),
        (0.0, "nfs4", "(nfs4) may answer from a cache"),
        (0.0, "fuse.sshfs", "(fuse.sshfs) may answer"),
        (0.0, "zfs", "(zfs) may answer"),
    ],
)
def test_a_reason_in_place_of_a_number(
    checkpoint: Checkpoint, share: float | None, kind: str, words: str
) -> None:
    found = measured(checkpoint, lambda *piece: share, kind)
    assert found.rates == ()
    assert words in found.reason
    assert check_rate(found).text.startswith("not measured: ")


@needs_linux
def test_memory_that_poses_as_a_disk_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "PROBE_MIN_BYTES", 0)
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("needs the tmpfs /dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=shm) as folder,
        Checkpoint.open(write_model(Path(folder), num_experts=12)) as opened,
    ):
        found = measure(ExpertLayout(opened), opened.stamps, THREADS, PER_TOKEN)
    assert found.rates == ()
    assert "in memory" in found.reason


@needs_linux
def test_sparse_files_give_no_number(checkpoint: Checkpoint) -> None:
    for path in checkpoint.stamps:
        status = path.stat()
        head = path.read_bytes()[:4096]
        os.truncate(path, 0)
        with open(path, "r+b") as file:
            file.write(head)
            file.truncate(status.st_size)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "sparse" in measured(checkpoint).reason


@needs_linux
def test_what_is_in_the_page_cache_is_seen_and_asking_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    with open(path, "wb") as file:
        file.write(os.urandom(8 << 20))
        os.fsync(file.fileno())
    assert cached_share(path, 5000, 3 << 20) == 1.0
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(path, 0, 8 << 20) == 1.0:
        pytest.skip("this file system keeps its files in memory")
    assert cached_share(path, 5000, 3 << 20) == 0.0
    assert cached_share(path, 0, 8 << 20) == 0.0
    path.read_bytes()
    assert cached_share(path, 5000, 3 << 20) == 1.0


def test_files_that_cannot_be_asked_about(tmp_path: Path) -> None:
    assert cached_share(tmp_path / "none", 0, 10) is None
    (tmp_path / "short").write_bytes(b"abc")
    assert cached_share(tmp_path / "short", 0, 1 << 20) in (None, 1.0)


@pytest.mark.skipif(not hasattr(os, "geteuid") or sys.platform == "darwin", reason="a rule of Linux")
def test_another_users_files_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "theirs"
    path.write_bytes(b"x" * 5000)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cached_share(path, 0, 5000) is None


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="holes cannot be found here")
def test_holes_are_not_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    with open(path, "wb") as file:
        file.write(os.urandom(1 << 20))
        file.truncate(4 << 20)
    assert on_disk(path, 4096, 1 << 19)
    if on_disk(path, 2 << 20, 1 << 20):
        pytest.skip("this file system has no holes")
    assert not on_disk(path, (1 << 20) - 100, 4096)
    assert not on_disk(path, 3 << 20, 1 << 20)


@needs_linux
def test_dropping_reaches_beyond_the_range_of_an_expert(checkpoint: Checkpoint) -> None:
    placement = ExpertLayout(checkpoint).place(1, 4)
    (piece,) = placement.pieces
    piece.path.read_bytes()
    with open(piece.path, "rb") as file:
        os.fsync(file.fileno())
    drop_cached([placement])
    assert cached_share(*piece[:3]) in (0.0, 1.0)  # 1 on a file system that keeps its files in memory
