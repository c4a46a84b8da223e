"""The script that writes the released layout without weights: byte-exact where the release is known."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.layout import INDEX_NAME
from k3mlx.checkpoint.safetensors import read_header
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.vision import vision_specs
from tests import tiny
from tests.paths import DATA, needs_data
from tests.scripts_at import script

make_sparse = script("make_sparse")
needs_blocks = pytest.mark.skipif(os.name == "nt", reason="the script needs sparse files")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A small model in three shards, in the dtypes of the release."""
    rng = np.random.default_rng(3)
    return tiny.write_random_model(tmp_path / "model", tiny.random_config(rng), rng, dtype="BF16", shards=3)


@needs_blocks
def test_a_small_layout_opens_and_holds_zeros(written: Path, tmp_path: Path) -> None:
    out = tmp_path / "sparse"
    make_sparse.main(
        [str(out), "--config", str(written / "config.json"), "--index", str(written / INDEX_NAME)]
    )
    with Checkpoint.open(written) as full, Checkpoint.open(out) as sparse:
        assert sparse.tensors.keys() == full.tensors.keys()
        assert not sparse.raw("lm_head.weight").any()
        assert full.raw("lm_head.weight").any()
        for name, info in sparse.tensors.items():
            assert (info.dtype, info.shape) == (full.tensors[name].dtype, full.tensors[name].shape)
    for path in written.glob("*.safetensors"):
        assert (out / path.name).stat().st_size == pytest.approx(path.stat().st_size, abs=200)


@needs_data
@needs_blocks
def test_shard_2_is_the_released_one_to_the_byte(tmp_path: Path) -> None:
    index = json.loads(gzip.decompress((DATA / f"{INDEX_NAME}.gz").read_bytes()))
    shard = "model-00002-of-000096.safetensors"
    weight_map = {name: file for name, file in index["weight_map"].items() if file == shard}
    sizes = make_sparse.write_shards(tmp_path, json.loads((DATA / "config.json").read_bytes()), weight_map)
    assert sizes.apparent == (tmp_path / shard).stat().st_size == 16_990_911_504
    assert sizes.real < 2_000_000
    tensors = list(read_header(tmp_path / shard).tensors.values())
    assert tensors[0].offset == 8 + 818_696
    experts = [int(t.name.split(".")[6]) for t in tensors if ".experts." in t.name]
    assert experts[::6][:4] == [0, 1, 10, 100]  # by name, not by number
    assert all(len(set(experts[n : n + 6])) == 1 for n in range(0, len(experts), 6))


def test_the_vision_part_has_the_released_bytes() -> None:
    specs = list(vision_specs())
    assert len({spec.name for spec in specs}) == 168
    assert sum(spec.nbytes for spec in specs) == 894_717_952


@needs_blocks
def test_a_file_system_that_takes_no_such_file(written: Path, tmp_path: Path) -> None:
    import resource

    index = json.loads((written / INDEX_NAME).read_text())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match=r"takes no file of .* bytes; choose another"):
            make_sparse.write_shards(
                tmp_path, json.loads((written / "config.json").read_text()), index["weight_map"]
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@needs_blocks
def test_a_file_system_without_sparse_files(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_sparse, "PROBE_BYTES", 0)
    with pytest.raises(SystemExit) as caught:
        make_sparse.main([str(tmp_path / "out")])
    assert caught.value.code == 1
    assert "no sparse files" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
