"""Findings about the files of a snapshot: what can be read, links, unfinished downloads, and the commands."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from k3mlx.checkpoint.hub import resolve
from k3mlx.checkpoint.resume import download_command
from k3mlx.convert.formats import PARTS, Formats
from k3mlx.convert.job import Job
from k3mlx.doctor import files
from k3mlx.doctor.files import (
    ABSENT,
    READ,
    REFUSED,
    STRAY,
    FileState,
    check_census,
    check_files,
    check_model,
    check_partial,
    commands_for,
    find_partial,
    look_at_files,
    open_model,
)
from k3mlx.doctor.findings import OK, WARNING
from k3mlx.errors import ModelFilesError
from tests.checkpoint.damage import needs_links, shard

from .facts import write_model

COMMIT = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "größer, with space")


def states(folder: Path) -> dict[str, str]:
    return {file.path.name: file.state for file in look_at_files([folder])}


def write_cache(root: Path) -> Path:
    """A snapshot as the hub's client lays it out, every file a link into the repository's blobs."""
    repo = root / "models--org--name"
    snapshot, blobs = repo / "snapshots" / COMMIT, repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(write_model(root / "made").iterdir())):
        file.replace(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    return snapshot


def test_a_folder_in_good_order(folder: Path) -> None:
    assert set(states(folder).values()) == {READ}
    (line,) = check_files(look_at_files([folder]), "fetch")
    assert (line.level, line.text) == (OK, "6 files can be read")


@needs_links
def test_links_that_lead_nowhere_and_elsewhere(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    shard(folder, 1).replace(outside)
    shard(folder, 1).symlink_to(outside)
    shard(folder, 2).unlink()
    shard(folder, 2).symlink_to(folder / "gone")
    (folder / "loop.json").symlink_to("loop.json")
    found = states(folder)
    assert found[shard(folder, 1).name] == STRAY
    assert found[shard(folder, 2).name] == ABSENT
    assert found["loop.json"] == STRAY
    lines = {line.text.partition(":")[0]: line for line in check_files(look_at_files([folder]), "fetch them")}
    assert "outside the snapshot" in lines[str(shard(folder, 1))].text
    assert "--model-dirs" in lines[str(shard(folder, 1))].remedy
    assert lines[str(shard(folder, 2))].text.endswith(f"a link to {folder / 'gone'}, which is not there")
    assert lines[str(shard(folder, 2))].remedy == "fetch them"


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = shard(folder, 3)

    def opened(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "open", opened, raising=False)
    lines = list(check_files([file for file in look_at_files([folder]) if file.path == refused], "fetch"))
    assert [line.text for line in lines] == [f"{refused}: cannot be read (Permission denied)"]
    assert lines[0].remedy.startswith(f"chmod u+r '{refused}'")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_permissions_for_real(folder: Path) -> None:
    shard(folder, 3).chmod(0)
    assert states(folder)[shard(folder, 3).name] == REFUSED
    folder.chmod(0o300)
    try:
        assert [file.state for file in look_at_files([folder])] == [REFUSED]
    finally:
        folder.chmod(0o700)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes in the file system")
def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")
    assert states(folder)["pipe.safetensors"] == STRAY


def test_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    (found,) = look_at_files([tmp_path / "none"])
    assert found.state == REFUSED
    assert "cannot be listed" in found.problem


def test_a_file_is_not_told_twice(folder: Path) -> None:
    broken, other = shard(folder, 1), shard(folder, 2)
    for path in (broken, other):
        path.write_bytes(b"")
    error = open_model(folder, ())
    assert isinstance(error, ModelFilesError)
    known = [FileState(broken, REFUSED, f"{broken}: cannot be read")]
    texts = [line.text for line in check_census(error, folder, known, files.Commands("fetch", "verify"))]
    assert len(texts) == 1
    assert other.name in texts[0]


@needs_links
def test_a_linked_cache_works_and_its_command_names_repository_and_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = write_cache(tmp_path / "drive with ü")
    cache = tmp_path / "hub"
    cache.symlink_to(tmp_path / "drive with ü")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    found = resolve("org/name")
    assert found != snapshot
    assert found.resolve() == snapshot.resolve()
    assert set(states(found).values()) == {READ}
    opened = open_model(found, ())
    assert not isinstance(opened, Exception)
    opened.close()
    assert download_command(found) == f"k3mlx download org/name --revision {COMMIT}"
    (found / "config.json").resolve().unlink()
    assert states(found)["config.json"] == ABSENT


@needs_links
def test_unfinished_downloads(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path)
    assert find_partial(snapshot) == []
    assert list(check_partial([], "fetch")) == []
    blob = snapshot.parents[1] / "blobs" / "abc.incomplete"
    blob.write_bytes(b"x" * 700)
    (line,) = check_partial(find_partial(snapshot), "fetch")
    assert (line.level, line.remedy) == (WARNING, "fetch")
    assert "1 files" in line.text
    assert "700 B" in line.text


def test_commands(folder: Path) -> None:
    assert f"--local-dir '{folder}'" in download_command(folder)
    assert "--verify" in download_command(folder, verify=True)
    assert download_command(resolve()) == "pip install --force-reinstall --no-deps k3mlx"


def test_a_model_that_is_not_there() -> None:
    line = check_model(
        ModelFilesError("a/b: neither a folder here nor in the cache; download it with: k3mlx download a/b")
    )
    assert line.text == "a/b: neither a folder here nor in the cache"
    assert line.remedy == "download it with: k3mlx download a/b"
    assert "--model" in check_model(ModelFilesError("not there")).remedy


def test_a_census_that_finds_nothing(folder: Path) -> None:
    opened = open_model(folder, ())
    assert not isinstance(opened, Exception)
    line = files.census_line(opened)
    opened.close()
    assert line.level == OK
    assert f"{len(opened.tensors)} tensors in 3 files" in line.text


def test_a_configuration_beside_damaged_tensors(folder: Path) -> None:
    config = files.read_config(folder)
    assert config is not None
    assert config.vocab_size == 512
    (folder / "config.json").write_text("{")
    assert files.read_config(folder) is None


def test_an_overlay_and_the_snapshot_it_refers_to_have_each_their_remedy(
    folder: Path, tmp_path: Path
) -> None:
    overlay = tmp_path / "overlay"
    Job(folder, overlay, Formats(dict.fromkeys(PARTS, 16))).run()
    opened = open_model(overlay, ())
    assert not isinstance(opened, Exception)
    opened.close()
    commands = commands_for(overlay)
    assert commands == files.Commands(
        download_command(folder), download_command(folder, verify=True), files.CONVERT
    )
    shard(folder, 2).unlink()
    assert remedies(overlay) == {commands.fetch}
    write_model(folder)
    (own,) = list(overlay.glob("*.safetensors"))[:1]
    own.write_bytes(own.read_bytes()[:-1])
    assert remedies(overlay) == {files.CONVERT}


def remedies(overlay: Path) -> set[str]:
    error = open_model(overlay, ())
    assert isinstance(error, ModelFilesError)
    return {line.remedy for line in check_census(error, overlay, (), commands_for(overlay))}
