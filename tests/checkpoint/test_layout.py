"""Which files a snapshot may consist of: an index that leads nowhere else, and links that stay inside."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from k3mlx.checkpoint.layout import find_layout
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.untrusted import shown
from k3mlx.checkpoint.writer import INDEX_NAME
from k3mlx.errors import ModelFilesError
from tests import tiny

from .damage import NORM, edit_index, findings, needs_links, payload, shard


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:\\model.safetensors",
        "C:model.safetensors",
        ".hidden.safetensors",
        "model.bin",
        "a\0.safetensors",
        "a\n.safetensors",
        "x" * 300 + ".safetensors",
        "..",
        "",
        3,
        None,
        ["model.safetensors"],
        {},
    ],
)
def test_index_leads_nowhere_else(folder: Path, name: Any) -> None:
    shutil.copy(shard(folder, 1), folder.parent / "model.safetensors")
    edit_index(folder, lambda index: index["weight_map"].update({NORM: name}))
    (line,) = findings(folder)
    assert line.startswith(f"{folder / INDEX_NAME}: tensor '{NORM}' is in {shown(name)}")
    assert line.endswith("expected the name of a safetensors file in the same folder")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[]", "weight_map is None"),
        (b"3", "weight_map is None"),
        (b"{}", "weight_map is None"),
        (b'{"weight_map": []}', r"weight_map is \[\]"),
        (b'{"weight_map": {}}', r"weight_map is \{\}"),
        (b'{"weight_map": {"a": "b.safetensors", "a": "b.safetensors"}}', "'a' appears twice"),
        (b'{"weight_map":' * 100_000, "not usable JSON|not valid JSON"),
        (b'{"weight_map": 1' + b"0" * 5000 + b"}", "not valid JSON|weight_map is 1"),
    ],
)
def test_index_that_cannot_be_used(folder: Path, text: bytes, expected: str) -> None:
    (folder / INDEX_NAME).write_bytes(text)
    with pytest.raises(ModelFilesError, match=expected) as caught:
        Checkpoint.open(folder)
    assert str(folder / INDEX_NAME) in str(caught.value)


def test_index_too_large_to_read(folder: Path) -> None:
    os.truncate(folder / INDEX_NAME, 1 << 40)
    assert findings(folder) == [f"{folder / INDEX_NAME}: {1 << 40} bytes, expected at most 250000000"]


def test_folder_without_weights(tmp_path: Path) -> None:
    tiny.write_spec_model(tmp_path, shards=2)
    (tmp_path / INDEX_NAME).unlink()
    (line,) = findings(tmp_path)
    assert f"neither model.safetensors nor {INDEX_NAME} found (2 other safetensors files)" in line
    (line,) = findings(tmp_path / "config.json")
    assert "config.json" in line


@needs_links
def test_links_that_leave_the_snapshot(folder: Path, tmp_path: Path) -> None:
    path = shard(folder, 2)
    outside = tmp_path / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    (line,) = findings(folder)
    assert line.startswith(f"{path}: links to {outside}, outside the snapshot")
    path.unlink()
    path.symlink_to(path.name)
    (line,) = findings(folder)
    assert line.startswith(f"{path}: ")
    path.unlink()
    path.mkdir()
    assert findings(folder) == [f"{path}: not a regular file"]


@needs_links
def test_links_within_the_snapshot(folder: Path, tmp_path: Path) -> None:
    path = shard(folder, 2)
    path.rename(folder / "moved")
    path.symlink_to("moved")
    (tmp_path / "alias").symlink_to(folder)
    Checkpoint.open(tmp_path / "alias").close()


@needs_links
def test_blobs_of_another_repository_are_outside(folder: Path, tmp_path: Path) -> None:
    """In a Hugging Face cache a link may lead to the blobs of the same repository only."""
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    path = shard(snapshot, 2)
    for blobs, allowed in ((repo / "blobs", True), (tmp_path / "models--org--other" / "blobs", False)):
        blobs.mkdir(parents=True)
        blob = blobs / ("f" * 64)
        path.resolve().rename(blob)
        path.unlink(missing_ok=True)
        path.symlink_to(os.path.relpath(blob, snapshot))
        if allowed:
            Checkpoint.open(snapshot).close()
            size = payload(path)
            blob.rename(tmp_path / "away")
            assert findings(snapshot) == [f"{path}: shard missing, {size} bytes"]
            (tmp_path / "away").rename(blob)
        else:
            (line,) = findings(snapshot)
            assert "outside the snapshot" in line


@needs_links
def test_blobs_beside_an_ordinary_folder_are_outside(folder: Path, tmp_path: Path) -> None:
    nested = tmp_path / "models" / "org" / "name"
    nested.parent.mkdir(parents=True)
    folder.rename(nested)
    (tmp_path / "models" / "blobs").mkdir()
    path = shard(nested, 2)
    path.rename(tmp_path / "models" / "blobs" / "b")
    path.symlink_to(tmp_path / "models" / "blobs" / "b")
    (line,) = findings(nested)
    assert "outside the snapshot" in line


@needs_links
@pytest.mark.parametrize("name", [INDEX_NAME, "model.safetensors"])
def test_entry_file_that_leaves_the_snapshot(tmp_path: Path, name: str) -> None:
    folder = tiny.write_spec_model(tmp_path / "model", shards=2 if name == INDEX_NAME else 1)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    (line,) = findings(folder)
    assert "outside the snapshot" in line
    with pytest.raises(ModelFilesError, match="outside the snapshot"):
        find_layout(folder)
