"""Runs over what is there already: offline, verified anew, folders with a past."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k3mlx.checkpoint.resume import RECORD
from k3mlx.download import Request
from k3mlx.errors import ModelFilesError, UsageError
from tests.hub_server import Cut, HubServer

from .served import (
    CUT,
    ONCE,
    OTHER,
    QUICK,
    SHARD,
    SIZE,
    VISION,
    check_files,
    damage,
    failure,
    needs_links,
    run,
)


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
