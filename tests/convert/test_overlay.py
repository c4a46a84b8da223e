"""Opening overlays: experts that moved or changed, manifests and files that are damaged."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.manifest import MANIFEST, read_manifest
from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.checkpoint.overlay import RepackedExperts
from k3mlx.config import load_config
from k3mlx.errors import ModelFilesError
from tests.checkpoint.damage import needs_links, rewrite

from .conftest import job


@pytest.fixture
def pair(source, overlay, tmp_path):
    """A source and its overlay in one folder: (source, overlay)."""
    here = tmp_path / "here"
    shutil.copytree(source, here / "source")
    job(here / "source", here / "overlay").run()
    return here / "source", here / "overlay"


def experts_of(folder):
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.expert_tensors(1, 0)["w1.weight_packed"].path.parent


def error_of(folder):
    with pytest.raises(ModelFilesError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


def edit(folder, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_both_moved_together(pair, tmp_path):
    os.rename(pair[0].parent, tmp_path / "there")
    assert experts_of(tmp_path / "there" / "overlay") == tmp_path / "there" / "source"


def test_the_overlay_moved_alone(pair, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    os.rename(pair[1], tmp_path / "a" / "b" / "overlay")
    assert experts_of(tmp_path / "a" / "b" / "overlay") == pair[0]


def test_the_source_moved_alone(pair, tmp_path):
    """The same command with the new place tells the overlay, and converts nothing again."""
    source, overlay = pair
    os.rename(source, tmp_path / "new place")
    error = error_of(overlay)
    assert f"the experts of this overlay are not at {source}" in error
    assert f"k3mlx convert --model FOLDER -o {overlay}" in error
    before = (overlay / "dense-00001.safetensors").stat().st_ino
    job(tmp_path / "new place", overlay).run()
    assert experts_of(overlay) == tmp_path / "new place"
    assert (overlay / "dense-00001.safetensors").stat().st_ino == before


@needs_links
def test_an_overlay_behind_a_link(pair, tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    link = tmp_path / "x" / "y" / "link"
    link.symlink_to(pair[1], target_is_directory=True)
    assert experts_of(link) == pair[0]


def test_a_shard_in_another_folder(pair, tmp_path):
    source, overlay = pair
    shard = sorted(source.glob("*.safetensors"))[1]
    (tmp_path / "more").mkdir()
    os.rename(shard, tmp_path / "more" / shard.name)
    assert f"{shard}: shard missing" in error_of(overlay)
    with open_checkpoint(overlay, [tmp_path / "more"]) as checkpoint:
        assert tmp_path / "more" / shard.name in checkpoint.stamps


def test_a_source_with_another_header_is_named(pair):
    source, overlay = pair
    shard = sorted(source.glob("*.safetensors"))[2]
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b'"format":"pt"', b'"format":"np"', 1))
    assert error_of(overlay) == (
        f"{shard}: changed since the overlay was made (its header is another); convert again"
    )


def test_a_source_of_another_size_is_named(pair):
    source, overlay = pair
    shard = sorted(source.glob("*.safetensors"))[2]
    size, data = shard.stat().st_size, shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    shard.write_bytes(
        (length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8 + data[8 + length :]
    )
    assert error_of(overlay) == (
        f"{shard}: changed since the overlay was made ({size + 8} bytes, expected {size}); convert again"
    )


def test_files_of_the_overlay_that_are_damaged_are_named(pair):
    _, overlay = pair
    path = overlay / "dense-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-7])
    assert f"{path}: truncated, 7 bytes are missing" in error_of(overlay)
    path.unlink()
    lines = error_of(overlay).splitlines()
    assert lines[0] == f"{path}: file not found"
    assert "tensor 'model.layers.1.input_layernorm.weight' is missing" in lines[1]


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({NORM: ("U8", np.zeros(96, np.uint8))}), f"'{NORM}' has dtype U8, expected BF16"),
        (lambda t: t.update({NORM: ("BF16", np.zeros(95, np.uint16))}), r"has shape \[95\], expected \[96\]"),
        (
            lambda t: t.update({"model.norm.weight": ("BF16", np.zeros(96, np.uint16))}),
            "'model.norm.weight' is also in dense-outer.safetensors",
        ),
        (lambda t: t.update(x=("U8", np.zeros(3, np.uint8))), "tensor 'x' is surplus"),
        (lambda t: t.pop(NORM), f"tensor '{NORM}' is missing"),
    ],
)
def test_tensors_that_do_not_belong_are_named(pair, change, message):
    """In a file of the overlay that has the size on record."""
    path = pair[1] / "dense-00001.safetensors"
    rewrite(path, change)
    (record,) = (n for n, file in enumerate(read_manifest(pair[1]).files) if file.name == path.name)
    edit(pair[1], lambda manifest: manifest["files"][record].update(size=path.stat().st_size))
    lines = error_of(pair[1]).splitlines()
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines
    assert "is missing" in message or lines[0].startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="k3mlx overlay 99"), "format is 'k3mlx overlay 99', expected"),
        (lambda m: m.pop("experts"), r"damaged \(KeyError"),
        (lambda m: m["files"][0].update(name="../secret.safetensors"), "is not the name of a file"),
        (lambda m: m["experts"]["files"][0].update(name="a/b"), "is not the name of a file"),
        (lambda m: m["files"].pop(), "4 of 5 files have been converted"),
        (lambda m: m["files"][2].update(size=5), r"bytes, expected 5; convert again"),
    ],
)
def test_a_damaged_manifest(pair, change, message):
    edit(pair[1], change)
    with pytest.raises(ModelFilesError, match=message):
        open_checkpoint(pair[1])


def test_a_repacked_expert_that_is_missing_is_named(source, tmp_path):
    out = tmp_path / "out"
    job(source, out, experts_to=out).run()
    edit(out, lambda m: [m["experts"]["files"].pop(), m["names"].pop(), m["files"].pop()])
    lines = error_of(out).splitlines()
    assert lines[0].startswith(
        "tensor 'model.layers.3.block_sparse_moe.experts.0.w1.weight_packed' is missing"
    )
    assert lines[-1].startswith("and ")


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (("U8", np.zeros((32, 31), np.uint8)), r"U8 \[32, 31\]"),
        (("I32", np.zeros((32, 32), np.int32)), r"I32 \[32, 32\]"),
    ],
)
def test_a_repacked_expert_of_another_kind_is_named(source, tmp_path, stored, found):
    job(source, tmp_path, experts_to=tmp_path).run()
    name = "model.layers.2.block_sparse_moe.experts.1.w1.weight_packed"
    rewrite(tmp_path / "experts-00002.safetensors", lambda tensors: tensors.update({name: stored}))
    files = sorted(path.name for path in tmp_path.glob("experts-*"))
    with pytest.raises(ModelFilesError, match=rf"tensor '{name}' is {found}, expected U8 \[32, 32\]"):
        RepackedExperts(tmp_path, load_config(tmp_path), files)


def test_a_repacked_file_that_changed_is_named(source, tmp_path):
    job(source, tmp_path / "out", experts_to=tmp_path / "experts").run()
    path = tmp_path / "experts" / "experts-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{Path(path)}: changed since the overlay was made" in error_of(tmp_path / "out")
    path.unlink()
    assert "experts-00002.safetensors: missing" in error_of(tmp_path / "out")
