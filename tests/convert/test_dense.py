"""Files of an overlay as streams: the same bytes in blocks of any size, errors that are those of the weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.manifest import read_manifest
from k3mlx.checkpoint.overlay import open_overlay
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.convert import dense
from k3mlx.errors import ModelFilesError
from tests.checkpoint.damage import rewrite

from .conftest import contents, job

LOUD = "model.layers.0.mlp.up_proj.weight"


def errors_of(overlay):
    return {name: error for file in read_manifest(overlay).files for name, error in file.errors.items()}


def test_errors_of_the_manifest_are_those_of_the_weights(source, overlay):
    errors = errors_of(overlay)
    with Checkpoint.open(source) as theirs, open_overlay(overlay) as ours:
        assert errors.keys() == ours.quantized.keys()
        for name, error in errors.items():
            weights = theirs.load(name).astype(np.float64)
            found = np.linalg.norm(ours.load(name) - weights) / np.linalg.norm(weights)
            assert error == pytest.approx(found, rel=1e-3), name


def test_a_row_is_the_smallest_block(source):
    with Checkpoint.open(source) as checkpoint:
        info = checkpoint.tensors[LOUD]
        blocks = list(dense._blocks(info, 1))
        assert [block.shape for block in blocks] == [(1, info.shape[1])] * info.shape[0]
        assert sum(block.nbytes for block in blocks) == info.nbytes


@pytest.mark.parametrize("block", [700, 10_000])
def test_bytes_and_errors_do_not_depend_on_blocks(source, overlay, tmp_path, monkeypatch, block):
    monkeypatch.setattr(dense, "BLOCK", block)
    monkeypatch.setattr(dense, "COPIED", block)
    job(source, tmp_path / "out").run()
    whole, cut = contents(overlay), contents(tmp_path / "out")
    assert {n: h for n, h in cut.items() if "dense" in n} == {n: h for n, h in whole.items() if "dense" in n}
    assert errors_of(tmp_path / "out") == pytest.approx(errors_of(overlay), rel=1e-3)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x5881, 0xD881])
def test_weights_that_are_not_finite_or_too_large_are_refused(source, tmp_path, bits):
    """Infinities, not a number, and the bfloat16 next above 2^50 with either sign."""
    copy = Path(shutil.copytree(source, tmp_path / "copy"))

    def damage(tensors):
        _, array = tensors[f"language_model.{LOUD}"]
        array[3, 5] = bits

    with Checkpoint.open(source) as checkpoint:
        rewrite(copy / checkpoint.tensors[LOUD].path.name, damage)
    with pytest.raises(ModelFilesError, match="not finite or absurdly large") as caught:
        job(copy, tmp_path / "out").run()
    assert f"tensor '{LOUD}'" in str(caught.value)
