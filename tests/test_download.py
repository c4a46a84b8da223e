"""Downloading from a server that speaks the hub's protocol: the real client library, real sockets on loopback."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import k3mlx
from k3mlx.checkpoint.hub import resolve
from k3mlx.checkpoint.resume import RECORD
from k3mlx.download import Meter, Patience, Request, Result, download
from k3mlx.download.places import STATE
from k3mlx.errors import K3Error, ModelFilesError, ResourceError, UsageError
from tests.hub_server import (
    COMMIT,
    INFO,
    Corrupt,
    Cut,
    HubServer,
    OtherRange,
    Short,
    Stall,
    Status,
    WholeFile,
    sha256,
)

NANO = Path(k3mlx.__file__).parent / "models" / "k3-nano"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
QUICK = Patience(timeout=5.0, attempts=3, first_wait=0.01, longest_wait=0.02)
ONCE = replace(QUICK, attempts=1)
SHARD, OTHER, VISION = (f"model-0000{n}-of-000003.safetensors" for n in (1, 2, 3))
SIZE = 655_361
CUT = 3 << 16  # 30 % of a shard; clients of huggingface_hub below 1.0 hand over 64 KiB at a time

needs_links = pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    """A repository of an index, two shards of the text model and one of vision only, of random bytes."""
    folder = tmp_path / "served"
    folder.mkdir()
    weights = {"language_model.lm_head.weight": SHARD, "language_model.model.norm.weight": OTHER}
    weights |= {"vision_tower.a": VISION, "mm_projector.b": VISION, "vision_tower.c": SHARD}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (folder / "config.json").write_text('{"model_type": "kimi_k3"}')
    (folder / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    rng = np.random.default_rng(7)
    for number, shard in enumerate((SHARD, OTHER, VISION)):
        (folder / shard).write_bytes(rng.bytes(SIZE + number))
    with HubServer.running(folder) as running:
        yield running


@pytest.fixture
def request_(server: HubServer, tmp_path: Path) -> Request:
    return Request("org/name", local_dir=tmp_path / "m ü", endpoint=server.url, patience=QUICK, offline=False)


def run(request: Request) -> tuple[Result, str]:
    """The result, and all that was noted."""
    notes: list[str] = []
    result = download(request, lambda meter: notes.extend(meter.take_notes()))
    return result, "\n".join(notes)


def failure(request: Request, kind: type[K3Error] = K3Error) -> str:
    with pytest.raises(K3Error) as caught:
        run(request)
    assert type(caught.value) is kind or (kind is K3Error and caught.value.exit_code == 1)
    return str(caught.value)


def check_files(server: HubServer, folder: Path, *absent: str) -> None:
    """Every served file is there with its bytes, nothing else, and no partial file."""
    wanted = {n: d for n, d in server.files.items() if not n.startswith(".") and n not in absent}
    there = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert there.keys() == wanted.keys()
    for name, data in wanted.items():
        assert there[name] == data, name
    assert not list(folder.rglob("*.incomplete"))


def part(server: HubServer, folder: Path, size: int | None = None) -> Path:
    """The partial file of the first shard, which has `size` bytes."""
    path = folder / STATE / f"{sha256(server.files[SHARD])}.{sha256(SHARD.encode())[:8]}.incomplete"
    assert size is None or path.stat().st_size == size
    return path


# fresh


def test_fresh_into_a_folder(server: HubServer, request_: Request) -> None:
    result, notes = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert result.skipped == {VISION: "vision only"}
    assert result.folder == request_.local_dir
    assert result.commit == COMMIT
    assert result.size == result.received == sum(map(len, server.files.values())) - SIZE - 2 - 24
    assert server.sent_of(VISION) == []
    assert "vision only" in notes
    again, _ = run(request_)
    assert again.received == 0


def test_vision_shards_when_asked_and_remembered(server: HubServer, request_: Request) -> None:
    run(request_)
    result, _ = run(replace(request_, vision=True))
    check_files(server, request_.local_dir)
    assert result.received == SIZE + 2
    (request_.local_dir / VISION).unlink()
    assert run(request_)[0].received == SIZE + 2


def test_a_shard_the_index_does_not_name_is_left(server: HubServer, request_: Request) -> None:
    server.files["consolidated.safetensors"] = b"x" * 10
    assert run(request_)[0].skipped["consolidated.safetensors"] == "not in the index"


@needs_links
def test_k3_nano_into_the_cache_opens_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    with HubServer.running(NANO) as server:
        result = download(Request("org/name", endpoint=server.url, patience=QUICK, offline=False))
    for file in NANO.iterdir():
        assert (result.folder / file.name).read_bytes() == file.read_bytes()
    assert resolve("org/name") == result.folder
    known = huggingface_hub.snapshot_download("org/name", cache_dir=cache, local_files_only=True)
    assert Path(known) == result.folder
    with k3mlx.load("org/name", backend="numpy") as engine, k3mlx.load(backend="numpy") as shipped:
        texts = [
            k3mlx.generate(e, prompt='Copy this: "blue harbor"', max_tokens=60) for e in (engine, shipped)
        ]
    assert texts[0] == texts[1]
    assert "blue harbor" in texts[0]


@needs_links
def test_the_cache_without_links_holds_the_files_themselves(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(OSError("not allowed")))
    request = Request("org/name", endpoint=server.url, patience=QUICK, offline=False)
    result, _ = run(request)
    check_files(server, result.folder, VISION)
    assert not any(p.is_symlink() for p in result.folder.iterdir())
    assert run(request)[0].received == 0


@needs_links
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_files_with_the_same_bytes(
    server: HubServer,
    request_: Request,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cached: bool,
    links: bool,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    if not links:
        monkeypatch.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(OSError("not allowed")))
    server.files[OTHER] = server.files[SHARD]
    server.files |= {"notes.txt": b"", "empty.txt": b""}
    request = replace(request_, local_dir=None) if cached else request_
    result, _ = run(request)
    check_files(server, result.folder, VISION)
    assert run(request)[0].received == 0
    if cached and links:
        assert len(server.sent_of(SHARD)) + len(server.sent_of(OTHER)) == 1


def test_shards_with_the_same_bytes_outside_the_cache(
    server: HubServer, request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    server.files[OTHER] = server.files[SHARD]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / SHARD).write_bytes(server.files[SHARD])
    run(replace(request_, local_dir=None, dirs=[tmp_path / "b"]))
    assert (tmp_path / "b" / OTHER).read_bytes() == server.files[SHARD]


# interrupted


@pytest.mark.parametrize("fault", [Cut(CUT), Stall(CUT), Short(CUT)])
def test_one_run_goes_on_after_a_cut_and_a_stall(server: HubServer, request_: Request, fault: object) -> None:
    server.faults[SHARD].append(fault)
    _, notes = run(replace(request_, patience=replace(QUICK, timeout=0.3)))
    check_files(server, request_.local_dir, VISION)
    first, second = server.sent_of(SHARD)
    assert first.start == 0
    assert second.start == first.count == CUT
    assert f"{SHARD}: " in notes
    assert "next attempt in 0.01 s" in notes


def test_any_number_of_cuts_as_long_as_something_comes(server: HubServer, request_: Request) -> None:
    server.faults[SHARD] += [Cut(1 << 16)] * 5
    run(replace(request_, patience=replace(QUICK, attempts=2)))
    check_files(server, request_.local_dir, VISION)


def test_the_next_run_goes_on_after_a_cut(server: HubServer, request_: Request) -> None:
    server.faults[SHARD].append(Cut(CUT))
    text = failure(replace(request_, patience=ONCE, max_workers=1))
    assert "gave up after 1 attempts" in text
    assert "run the same command again" in text
    part(server, request_.local_dir, CUT)
    assert not (request_.local_dir / SHARD).exists()
    result, _ = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert [(s.start, s.count) for s in server.sent_of(SHARD)] == [
        (0, CUT),
        (CUT, SIZE - CUT),
    ]
    assert server.sent_of("config.json")[1:] == []
    assert result.received == SIZE - CUT + len(server.files[OTHER])


def test_the_next_run_takes_the_commit_of_the_first(server: HubServer, request_: Request) -> None:
    server.faults[SHARD].append(Cut(100))
    failure(replace(request_, patience=ONCE))
    server.commit = "f" * 40
    server.asked.clear()
    assert run(replace(request_, revision="main"))[0].commit == COMMIT
    assert not any(path.startswith("/api/") for path in server.asked)
    server.commits.add(server.commit)
    assert run(request_)[0].commit == COMMIT
    assert run(replace(request_, revision="main"))[0].commit == "f" * 40, "complete, so main is looked up"
    assert run(request_)[0].received == 0


@pytest.mark.parametrize("fault", [WholeFile(), OtherRange(5), Status(416)])
def test_a_server_that_will_not_go_on(server: HubServer, request_: Request, fault: object) -> None:
    server.faults[SHARD] += [Cut(CUT), fault]
    _, notes = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert "wrong hash" not in notes


def test_a_file_that_was_cut_short_on_disk_gets_only_what_it_lacks(
    server: HubServer, request_: Request
) -> None:
    run(request_)
    os.truncate(request_.local_dir / SHARD, SIZE - 1)
    assert run(request_)[0].received == 1
    check_files(server, request_.local_dir, VISION)


def test_a_file_that_is_too_long_is_replaced(server: HubServer, request_: Request) -> None:
    run(request_)
    with open(request_.local_dir / SHARD, "ab") as file:
        file.write(b"more")
    assert run(request_)[0].received == SIZE
    check_files(server, request_.local_dir, VISION)


# wrong answers


def test_a_wrong_hash_is_fetched_again(server: HubServer, request_: Request) -> None:
    server.faults[SHARD].append(Corrupt(5))
    server.faults["config.json"].append(Corrupt(5))
    _, notes = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert len(server.sent_of(SHARD)) == len(server.sent_of("config.json")) == 2
    assert f"{SHARD}: came with a wrong hash; fetching it again" in notes


def test_a_wrong_hash_twice_is_an_error_and_the_rest_goes_on(server: HubServer, request_: Request) -> None:
    server.faults[SHARD] += [Corrupt(5), Corrupt(SIZE - 1)]
    assert f"{SHARD}: came twice with a wrong hash" in failure(request_)
    check_files(server, request_.local_dir, VISION, SHARD)


def test_a_part_with_wrong_bytes_is_found_at_the_end(server: HubServer, request_: Request) -> None:
    server.faults[SHARD].append(Cut(CUT))
    failure(replace(request_, patience=ONCE))
    part(server, request_.local_dir).write_bytes(b"\0" * CUT)
    run(request_)
    check_files(server, request_.local_dir, VISION)


@pytest.mark.parametrize("where", [SHARD, INFO])
def test_too_many_requests_waits_as_long_as_asked(server: HubServer, request_: Request, where: str) -> None:
    server.faults[where].append(Status(429, (("Retry-After", "1"),)))
    _, notes = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert "the server answers 429; next attempt in 1 s" in notes


@pytest.mark.parametrize("where", [SHARD, INFO])
def test_an_error_of_the_server_is_tried_again(server: HubServer, request_: Request, where: str) -> None:
    server.faults[where] += [Status(500), Status(503)]
    _, notes = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert "answers 500; next attempt in 0.01 s" in notes
    assert "answers 503; next attempt in 0.02 s" in notes


def test_an_error_that_stays_ends_the_run(server: HubServer, request_: Request) -> None:
    server.faults[SHARD] += [Status(500)] * 3
    assert f"{SHARD}: the server answers 500; gave up after 3 attempts" in failure(request_)
    server.faults[INFO] += [Status(502)] * 3
    assert "gave up after 3" in failure(replace(request_, local_dir=request_.local_dir / "new"))


def test_nobody_answers(server: HubServer, request_: Request) -> None:
    server.shutdown()
    server.server_close()
    assert "org/name at main: ConnectError" in failure(request_) or "ConnectionError" in failure(request_)


def test_unknown_names(request_: Request) -> None:
    assert "not found" in failure(replace(request_, repo="org/none"), UsageError)
    assert "not found" in failure(replace(request_, revision="v9"), UsageError)
    for bad in (
        Request("name"),
        Request(revision="../x"),
        Request(max_workers=0),
        Request(dirs=[Path("/no/x")]),
    ):
        failure(bad, UsageError)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a\\b", "a//b", "c:x", "a\nb"])
def test_a_name_that_leads_elsewhere_is_refused(server: HubServer, request_: Request, name: str) -> None:
    server.files["a/" + name if name.startswith(".") else name] = b"evil"
    assert "expected a plain path" in failure(request_, ModelFilesError)
    assert not request_.local_dir.exists()


def test_files_in_folders_of_the_repository(server: HubServer, request_: Request) -> None:
    server.files["docs/a b.txt"] = b"text"
    run(request_)
    assert (request_.local_dir / "docs" / "a b.txt").read_bytes() == b"text"


# tokens


def test_the_token_goes_to_the_hub_and_no_further(
    server: HubServer, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "hf_good"
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    run(request_)  # the second origin answers 400 to a token
    check_files(server, request_.local_dir, VISION)


def test_a_revoked_token_says_what_to_do(
    server: HubServer, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "hf_good"
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    text = failure(request_)
    assert "refused this token (401); it may be revoked" in text
    assert "hf auth login" in text
    assert "hf_revoked" not in text


def test_a_token_revoked_in_the_middle(
    server: HubServer, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    server.faults[SHARD].append(Cut(CUT))
    failure(replace(request_, patience=ONCE))
    server.token = "hf_new"
    assert "refused this token (401)" in failure(request_)
    part(server, request_.local_dir, CUT)


def test_gated_and_private(server: HubServer, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("k3mlx.download.remote.get_token", lambda: None)
    server.token = "hf_good"
    assert "not found, or not public (401)" in failure(request_)
    server.refused = Status(403, (("X-Error-Code", "GatedRepo"),))
    assert f"accept its terms at {server.url}/org/name" in failure(request_)


# disks


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


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


# several folders


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


# without the network


def test_offline(server: HubServer, request_: Request) -> None:
    offline = replace(request_, offline=True)
    assert "no record says which files it has" in failure(offline, ModelFilesError)
    server.faults[SHARD].append(Cut(CUT))
    failure(replace(request_, patience=ONCE, max_workers=1))
    text = failure(offline, ModelFilesError)
    assert text.splitlines() == [
        f"{request_.local_dir / SHARD}: {SIZE - CUT} of {SIZE} bytes are missing, and HF_HUB_OFFLINE is set",
        f"{request_.local_dir / OTHER}: {SIZE + 1} of {SIZE + 1} bytes are missing, and HF_HUB_OFFLINE is set",
    ]
    run(request_)
    asked = len(server.asked)
    assert run(offline)[0].received == 0
    assert len(server.asked) == asked


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1234] ^= 4
    path.write_bytes(data)


def test_verify_finds_and_replaces_what_is_damaged(server: HubServer, request_: Request) -> None:
    run(request_)
    damage(request_.local_dir / SHARD)
    assert run(request_)[0].received == 0, "sizes tell nothing"
    text = failure(replace(request_, verify=True, offline=True), ModelFilesError)
    assert f"{request_.local_dir / SHARD}: not the {SIZE} bytes that the repository lists" in text
    result, notes = run(replace(request_, verify=True))
    assert result.received == SIZE
    assert f"{request_.local_dir / SHARD}: not what the repository lists" in notes
    assert f"0 B to fetch, {result.size / 1e6:.2f} MB here to hash" in notes
    check_files(server, request_.local_dir, VISION)


@needs_links
def test_verify_in_the_cache(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    request = Request("org/name", endpoint=server.url, patience=QUICK, offline=False, verify=True)
    result, _ = run(request)
    damage(result.folder / SHARD)
    (result.folder / OTHER).unlink()  # the name only: the blob is there
    assert run(request)[0].received == SIZE
    check_files(server, result.folder, VISION)


# folders with a past


def test_files_of_unknown_origin_are_hashed_not_fetched(server: HubServer, request_: Request) -> None:
    run(request_)
    shutil.rmtree((request_.local_dir / RECORD).parent)
    damage(request_.local_dir / OTHER)
    result, notes = run(request_)
    assert result.received == SIZE + 1
    assert "1.31 MB here to hash" in notes
    check_files(server, request_.local_dir, VISION)


def test_a_folder_with_another_model_is_left_alone(server: HubServer, request_: Request) -> None:
    request_.local_dir.mkdir()
    (request_.local_dir / "config.json").write_text("{}")
    assert "is not that of org/name" in failure(request_, UsageError)
    assert [p.name for p in request_.local_dir.iterdir()] == ["config.json"]


def test_a_folder_on_record_names_its_repository(request_: Request) -> None:
    run(request_)
    assert run(replace(request_, repo=None))[0].repo == "org/name"
    assert "holds org/name, not a/b" in failure(replace(request_, repo="a/b"), UsageError)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": 1, "files": {"../x": ["../x", 1, "git", "0"]}}']
)
def test_a_damaged_record(request_: Request, text: str) -> None:
    run(request_)
    (request_.local_dir / RECORD).write_text(text)
    assert str(request_.local_dir / RECORD) in failure(request_, ModelFilesError)


def test_nothing_of_the_client_is_imported_before_it_is_needed() -> None:
    code = "import sys, k3mlx.cli.download; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
