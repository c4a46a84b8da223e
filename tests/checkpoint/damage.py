"""What the tests of damaged snapshots share: changing a shard or the index, and the lines of the error."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from k3mlx.checkpoint.safetensors import read_header
from k3mlx.checkpoint.snapshot import Checkpoint, read_tensor
from k3mlx.checkpoint.writer import INDEX_NAME, write_safetensors
from k3mlx.errors import ModelFilesError

NORM = "language_model.model.norm.weight"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.4."
needs_links = pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-000003.safetensors"


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][name]


def other_shard(folder: Path, name: str) -> Path:
    return shard(folder, 1 if shard_of(folder, name) != shard(folder, 1) else 2)


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """Write a shard again after `change` has edited its dict of (dtype, array)."""
    tensors = {name: (info.dtype, read_tensor(info)) for name, info in read_header(path).tensors.items()}
    change(tensors)
    write_safetensors(path, tensors)


def edit_index(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def findings(folder: Path) -> list[str]:
    with pytest.raises(ModelFilesError) as caught:
        Checkpoint.open(folder)
    assert caught.value.exit_code == 3
    return str(caught.value).splitlines()


def payload(path: Path) -> int:
    return sum(info.nbytes for info in read_header(path).tensors.values())
