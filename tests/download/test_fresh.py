"""Downloads into an empty folder and into the cache: what is wanted, once each."""

from dataclasses import replace
from pathlib import Path

import pytest

import k3mlx
from k3mlx.checkpoint.hub import resolve
from k3mlx.download import Request, download
from tests.hub_server import COMMIT, HubServer
from tests.paths import NANO

from .served import OTHER, QUICK, SHARD, SIZE, VISION, check_files, needs_links, run


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
