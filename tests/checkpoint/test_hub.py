"""Finding a model: folders, the local Hugging Face cache, the shipped model, and the message for each miss."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3mlx.checkpoint import hub
from k3mlx.checkpoint.hub import resolve
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.errors import ModelFilesError
from tests import tiny

needs_links = pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
COMMIT = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def write_cached(cache: Path, repo: str = "org/name", commit: str = COMMIT, main: bool = True) -> Path:
    """A snapshot as the hub's client lays it out: links into the repository's blobs."""
    root = cache / ("models--" + repo.replace("/", "--"))
    snapshot, blobs = root / "snapshots" / commit, root / "blobs"
    real = tiny.write_spec_model(cache.parent / "made", shards=2)
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for number, file in enumerate(sorted(real.iterdir())):
        blob = blobs / f"{number:064x}"
        file.replace(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if main:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(commit)
    return snapshot


def failure(model: str | Path | None) -> str:
    with pytest.raises(ModelFilesError) as caught:
        resolve(model)
    return str(caught.value)


def test_local_folder(tmp_path: Path) -> None:
    folder = tiny.write_spec_model(tmp_path / "with space and ü")
    assert resolve(folder) == resolve(str(folder)) == folder


def test_folder_that_cannot_be_a_model(tmp_path: Path) -> None:
    assert "model folder not found" in failure(tmp_path / "none")
    assert "model folder not found" in failure("a/b/c")
    assert "model folder not found" in failure("x" * 5000)
    assert "model folder not found" in failure("a\0b")
    (tmp_path / "empty").mkdir()
    assert "model folder is empty" in failure(tmp_path / "empty")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").touch()
    assert "no config.json in this folder" in failure(tmp_path / "bare")
    assert "a file, expected the folder" in failure(tmp_path / "bare" / "model.safetensors")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    folder = tiny.write_spec_model(tmp_path / "m")
    assert resolve("~/m") == folder


@needs_links
def test_cached_repository_opens_through_its_links(cache: Path) -> None:
    snapshot = write_cached(cache)
    folder = resolve("org/name")
    assert folder == snapshot
    with Checkpoint.open(folder) as checkpoint:
        expected = tiny.spec_tensors()["lm_head.weight"]
        assert (checkpoint.load("lm_head.weight") == expected).all()


@needs_links
def test_existing_folder_wins_over_the_cache(cache: Path, tmp_path: Path) -> None:
    write_cached(cache)
    tiny.write_spec_model(tmp_path / "org" / "name")
    assert resolve("org/name") == Path("org/name")


def test_repository_that_is_not_cached(cache: Path) -> None:
    text = failure("moonshotai/Kimi-K3")
    assert "neither a folder here nor in the Hugging Face cache" in text
    assert str(cache) in text
    assert "k3mlx download moonshotai/Kimi-K3" in text


@needs_links
def test_cached_repository_without_config(cache: Path) -> None:
    snapshot = write_cached(cache)
    (snapshot / "config.json").unlink()
    assert "no config.json" in failure("org/name")
    assert "k3mlx download org/name" in failure("org/name")


@needs_links
def test_snapshot_without_main(cache: Path) -> None:
    first = write_cached(cache, main=False)
    assert resolve("org/name") == first
    second = first.parent / COMMIT[::-1]
    second.mkdir()
    assert "2 snapshots and no main" in failure("org/name")


@needs_links
@pytest.mark.parametrize("main", [b"../../../secret", b"", b"\0", b"\xff", b"f" * 40])
def test_main_that_names_no_snapshot(cache: Path, main: bytes) -> None:
    snapshot = write_cached(cache)
    (cache.parent / "secret").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_bytes(main)
    assert resolve("org/name") == snapshot


def test_without_a_name_it_is_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "k3mlx" / "checkpoint" / "hub.py"))
    assert "k3-nano: model folder not found; reinstall k3mlx" in failure(None)
    folder = tiny.write_spec_model(tmp_path / "k3mlx" / "models" / "k3-nano")
    assert resolve(None) == folder


def test_hub_client_is_imported_only_when_needed() -> None:
    code = (
        "import sys, k3mlx.checkpoint.hub, k3mlx.checkpoint.snapshot; print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
