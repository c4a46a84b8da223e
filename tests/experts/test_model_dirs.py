"""Shards in several folders: missing ones found elsewhere, copies read in turn."""

import os
import shutil

import numpy as np
import pytest

import k3mlx
from k3mlx.errors import ModelFilesError, UsageError
from k3mlx.experts import files as files_module

PROMPT = [5, 9, 2, 60]
OPTIONS = {"backend": "numpy", "expert_cache": 0, "warm_start": "off", "prefill_step_size": 4}


def logits(folder, **options):
    with k3mlx.load(folder, **OPTIONS, **options) as engine:
        return engine.session().feed(PROMPT)


@pytest.fixture
def spread(packed_folder, tmp_path):
    """The model with one shard moved to another folder, and a third folder that has a copy of every shard."""
    main = shutil.copytree(packed_folder, tmp_path / "main")
    other, copies = tmp_path / "other", tmp_path / "copies"
    other.mkdir()
    copies.mkdir()
    shards = sorted(main.glob("*.safetensors"))
    for shard in shards:
        shutil.copy(shard, copies)
    shutil.move(shards[1], other)
    return main, other, copies


def test_shards_may_be_in_other_folders(packed_folder, spread):
    main, other, copies = spread
    with pytest.raises(ModelFilesError, match=r"model-00002-of-000003.safetensors: shard missing"):
        logits(main)
    expected = logits(packed_folder)
    np.testing.assert_array_equal(logits(main, model_dirs=[other]), expected)
    np.testing.assert_array_equal(logits(main, model_dirs=[str(copies)]), expected)
    np.testing.assert_array_equal(logits(main, model_dirs=[other, copies]), expected)


def test_reads_are_spread_over_drives_with_copies(packed_folder, spread, monkeypatch):
    _, _, copies = spread
    monkeypatch.setattr(files_module, "_device", lambda path: int(path.parent == copies))
    with k3mlx.load(packed_folder, **OPTIONS, model_dirs=[copies]) as engine:
        store = engine.backend.store
        for layer in (1, 2, 3):
            list(store.fetch(layer, range(9)))
        done = [load[1] for _, load in sorted(store.files._load.items())]
        assert len(done) == 2
        assert abs(done[0] - done[1]) <= 8 * store.payload
        assert sum(done) == 27 * store.payload
        assert all(waiting == 0 for waiting, _ in store.files._load.values())


def test_a_copy_stands_in_for_a_file_that_has_gone(packed_folder, spread):
    main, _, copies = spread
    shutil.copy(copies / "model-00002-of-000003.safetensors", main)
    with k3mlx.load(main, **OPTIONS, model_dirs=[copies]) as engine:
        for shard in copies.glob("*.safetensors"):
            os.truncate(shard, 100)
        np.testing.assert_array_equal(engine.session().feed(PROMPT), logits(packed_folder))


def test_another_file_under_the_same_name_is_refused(packed_folder, spread):
    _, _, copies = spread
    shard = copies / "model-00001-of-000003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data + b"x")
    with pytest.raises(ModelFilesError, match=r"copies.model-00001.*: not a copy of .*other contents"):
        logits(packed_folder, model_dirs=[copies])
    shard.write_bytes(data.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ModelFilesError, match="not a copy of"):
        logits(packed_folder, model_dirs=[copies])
    with pytest.raises(UsageError, match="none is not a folder"):
        logits(packed_folder, model_dirs=[copies / "none"])
