"""Full disks, folders that are in use, and shards over several folders."""

import contextlib
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import k3mlx
from k3mlx.download import Meter, Request, download
from k3mlx.errors import K3Error, ModelFilesError, ResourceError
from tests.hub_server import Cut, HubServer
from tests.paths import NANO

from .served import CUT, ONCE, OTHER, SHARD, SIZE, VISION, check_files, failure, part, run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(server: HubServer, request_: Request) -> None:
    server.faults[SHARD].append(Cut(CUT))
    failure(replace(request_, patience=ONCE, max_workers=1))
    path = part(server, request_.local_dir)
    path.unlink()
    path.symlink_to("/dev/full")
    text = failure(replace(request_, max_workers=1))
    assert f"disk full at {SHARD}" in text
    assert f"({2 * SIZE + 1} bytes) are still missing" in text


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def test_a_disk_that_fills_up_keeps_what_came(server: HubServer, request_: Request, small_disk: Path) -> None:
    """Somebody else takes the space after the check, while 30 % of a shard is here."""
    gate = threading.Event()
    server.paused[SHARD] = (CUT, gate)
    filler = small_disk / "filler"

    def watch(meter: Meter) -> None:
        if meter.done >= CUT and not gate.is_set():
            fill(filler)
            gate.set()

    request = replace(request_, local_dir=small_disk / "m", max_workers=1)
    with pytest.raises(K3Error, match="disk full") as caught:
        download(request, watch)
    assert caught.value.exit_code == 1
    kept = part(server, request.local_dir).stat().st_size
    assert kept >= CUT
    assert f"({2 * SIZE + 1 - kept} bytes) are still missing" in str(caught.value)
    filler.unlink()
    server.paused.clear()
    run(request)
    check_files(server, request.local_dir, VISION)
    assert server.sent_of(SHARD)[-1].start == kept


def test_what_does_not_fit_is_not_begun(server: HubServer, request_: Request, small_disk: Path) -> None:
    with open(small_disk / "filler", "wb") as file:
        file.write(b"\0" * 1_000_000)
    text = failure(replace(request_, local_dir=small_disk / "m"), ResourceError)
    assert "1.31 MB are still missing and do not fit" in text
    assert "--dirs" in text
    assert server.sent_of(SHARD) == []


def test_a_second_download_is_kept_out(server: HubServer, request_: Request) -> None:
    gate = threading.Event()
    server.paused[SHARD] = (CUT, gate)
    told: list[str] = []

    def watch(meter: Meter) -> None:
        if meter.received > 500 and not told:
            told.append(failure(request_))
            gate.set()

    download(request_, watch)
    assert "another download is writing here" in told[0]


def test_shards_over_folders_are_found_again(server: HubServer, request_: Request, tmp_path: Path) -> None:
    others = [tmp_path / "b b", tmp_path / "c"]
    others[0].mkdir()
    (others[0] / OTHER).write_bytes(server.files[OTHER])  # a copy that is there already is used, once hashed
    result, _ = run(replace(request_, dirs=others))
    assert result.received == result.size - SIZE - 1
    assert list(result.dirs) == others
    check_files(server, request_.local_dir, VISION, OTHER)
    again, _ = run(request_)
    assert again.received == 0
    assert list(again.dirs) == others


def test_a_newer_commit_keeps_folders_and_what_is_verified(
    server: HubServer, request_: Request, tmp_path: Path
) -> None:
    run(replace(request_, dirs=[tmp_path / "b"], vision=True))
    server.commit = "f" * 40
    server.commits.add(server.commit)
    server.files[SHARD] = server.files[SHARD][::-1]
    result, _ = run(replace(request_, revision="main"))
    assert result.commit == "f" * 40
    assert result.received == SIZE
    assert list(result.dirs) == [tmp_path / "b"]
    assert result.skipped == {}


def test_a_part_in_another_folder_goes_on_there(server: HubServer, request_: Request, tmp_path: Path) -> None:
    other = tmp_path / "b"
    server.faults[SHARD].append(Cut(CUT))
    failure(replace(request_, patience=ONCE, dirs=[other], max_workers=1))
    path = part(server, request_.local_dir, CUT)
    moved = other / path.relative_to(request_.local_dir)
    path.rename(moved)
    run(request_)
    assert (other / SHARD).read_bytes() == server.files[SHARD]
    assert server.sent_of(SHARD)[-1].start == CUT


def test_a_folder_that_is_not_mounted(server: HubServer, request_: Request, tmp_path: Path) -> None:
    other = tmp_path / "b"
    run(replace(request_, dirs=[other]))
    shutil.rmtree(other)
    assert f"{other}: took shards, but is not there" in failure(request_, ModelFilesError)
    run(replace(request_, dirs=[tmp_path / "c"]))


def test_k3_nano_over_two_folders_opens(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    second.mkdir()
    for number in (2, 3):
        shutil.copy(NANO / f"model-0000{number}-of-000004.safetensors", second)
    with HubServer.running(NANO) as server:
        download(Request("org/name", local_dir=first, dirs=[second], endpoint=server.url, offline=False))
    assert len(list(first.glob("*.safetensors"))) == len(list(second.glob("*.safetensors"))) == 2
    with k3mlx.load(first, model_dirs=[second], backend="numpy") as engine:
        assert k3mlx.generate(engine, prompt="Hello", max_tokens=60)
