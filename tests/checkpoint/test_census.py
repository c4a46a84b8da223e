"""The census: each kind of damage in a snapshot is named exactly, all of it in one error."""

import gc
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.findings import Findings
from k3mlx.checkpoint.safetensors import read_header
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.writer import INDEX_NAME, write_safetensors
from k3mlx.errors import ModelFilesError
from tests import tiny

from .damage import (
    EXPERT,
    NORM,
    edit_index,
    findings,
    other_shard,
    payload,
    rewrite,
    shard,
    shard_of,
)


def test_complete_model_opens(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        assert len(checkpoint.tensors) == 272


def test_missing_shard_is_one_finding_with_its_bytes(folder: Path) -> None:
    size = payload(shard(folder, 2))
    shard(folder, 2).unlink()
    assert findings(folder) == [f"{shard(folder, 2)}: shard missing, {size} bytes"]


def test_the_command_that_puts_it_right(folder: Path) -> None:
    """Hashing all is only asked for where sizes do not tell what is damaged."""
    size = shard(folder, 2).stat().st_size
    for cut, flags in ((size - 1, ""), (20, " --verify")):
        os.truncate(shard(folder, 2), cut)
        with pytest.raises(ModelFilesError) as caught:
            Checkpoint.open(folder)
        command = f"k3mlx download moonshotai/Kimi-K3 --local-dir {folder}{flags}"
        assert caught.value.advice == f"fetch what is missing or damaged: {command}"


def test_missing_shards_share_the_total(folder: Path) -> None:
    """Stored dtypes are the released ones only for experts, so sizes by shape are called approximate."""
    shard(folder, 1).unlink()
    shard(folder, 3).unlink()
    lines = findings(folder)
    assert [line.split(":")[0] for line in lines] == [str(shard(folder, 1)), str(shard(folder, 3))]
    assert all("shard missing, about " in line for line in lines)


def test_missing_shards_of_released_dtypes_are_told_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    folder = tiny.write_random_model(tmp_path, tiny.random_config(rng), rng, dtype="BF16", shards=3)
    sizes = {path: payload(path) for path in (shard(folder, 1), shard(folder, 3))}
    for path in sizes:
        path.unlink()
    assert findings(folder) == [f"{path}: shard missing, {size} bytes" for path, size in sizes.items()]


def test_missing_shard_without_a_total(folder: Path) -> None:
    shard(folder, 2).unlink()
    for metadata in ({}, {"total_size": "1"}, None, {"total_size": 12.5}, {"total_size": 7}):
        edit_index(folder, lambda index, value=metadata: index.update(metadata=value))
        (line,) = findings(folder)
        assert line.startswith(f"{shard(folder, 2)}: shard missing, about ")


def test_what_is_not_of_the_index_does_not_count_as_present(folder: Path) -> None:
    size = payload(shard(folder, 2))
    shard(folder, 2).unlink()
    rewrite(shard(folder, 1), lambda tensors: tensors.update(x=("U8", np.zeros(1000, np.uint8))))
    lines = findings(folder)
    assert lines[0] == f"{shard(folder, 2)}: shard missing, {size} bytes"
    assert "'x' is surplus" in lines[1]


def test_renamed_shards_are_pointed_out_each_at_its_own(folder: Path) -> None:
    """Also one that was cut besides; a file with other tensors or none is told of nowhere."""
    shutil.copy(shard(folder, 1), folder / "copy.safetensors")
    rewrite(folder / "copy.safetensors", lambda tensors: tensors.popitem())
    (folder / "notes.safetensors").write_bytes(b"not a header")
    for number, name in ((1, None), (2, "z.safetensors"), (3, "a.safetensors")):
        path = shard(folder, number)
        path.unlink() if name is None else path.rename(folder / name)
    os.truncate(folder / "z.safetensors", (folder / "z.safetensors").stat().st_size - 1)
    hints = ["", *(f" (its tensors are in '{name}.safetensors': rename that file)" for name in "za")]
    lines = findings(folder)
    assert [line.partition(" bytes")[2] for line in lines] == hints
    assert [line.partition(":")[0] for line in lines] == [str(shard(folder, number)) for number in (1, 2, 3)]


def test_shard_cut_by_one_byte(folder: Path) -> None:
    path = shard(folder, 2)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert findings(folder) == [
        f"{path}: truncated, 1 bytes are missing ({size - 1} present, {size} expected)"
    ]


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.1, 0.5, 0.99])
def test_shard_cut_anywhere_is_one_finding(folder: Path, part: float) -> None:
    path = shard(folder, 3)
    os.truncate(path, int(path.stat().st_size * part))
    (line,) = findings(folder)
    assert line.startswith(f"{path}: truncated")
    assert "missing" in line


def test_single_file_cut(tmp_path: Path) -> None:
    path = tiny.write_spec_model(tmp_path) / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    (line,) = findings(tmp_path)
    assert f"{path}: truncated" in line
    os.truncate(path, 3)
    assert findings(tmp_path) == [f"{path}: truncated, 3 bytes, at least 5 are missing"]


def test_missing_tensor(folder: Path) -> None:
    path = shard_of(folder, NORM)
    rewrite(path, lambda tensors: tensors.pop(NORM))
    assert findings(folder) == [
        f"{path}: tensor 'model.norm.weight' is missing, BF16 [32], 64 bytes (the index names it here)"
    ]
    edit_index(folder, lambda index: index["weight_map"].pop(NORM))
    assert findings(folder) == [
        f"{folder / INDEX_NAME}: tensor 'model.norm.weight' is missing, BF16 [32], 64 bytes"
    ]


def test_missing_expert_tensor_of_a_single_file(tmp_path: Path) -> None:
    tensors = tiny.spec_tensors()
    del tensors[EXPERT.removeprefix("language_model.") + "w3.weight_scale"]
    tiny.write_model(tmp_path, tiny.SPEC_CONFIG, tensors)
    (line,) = findings(tmp_path)
    assert "experts.4.w3.weight_scale' is missing, U8 [32, 1], 32 bytes" in line


def test_surplus_tensor(folder: Path) -> None:
    path = shard(folder, 2)
    for name in (
        "language_model.model.extra.weight",
        EXPERT + "w1.weight",
        EXPERT.replace("4.", "6.") + "w1.weight_scale",
        EXPERT.replace("4.", "04.") + "w1.weight_scale",
        EXPERT.replace("layers.2", "layers.0") + "w1.weight_scale",
    ):
        shutil.copy(path, folder / "kept")
        rewrite(path, lambda tensors, name=name: tensors.update({name: ("U8", np.zeros(3, np.uint8))}))
        assert findings(folder) == [
            f"{path}: tensor '{name}' is surplus: the configuration calls for no such tensor"
        ]
        (folder / "kept").replace(path)


def test_tensor_that_the_index_does_not_name(folder: Path) -> None:
    edit_index(folder, lambda index: index["weight_map"].pop(NORM))
    assert findings(folder) == [f"{shard_of_norm(folder)}: tensor '{NORM}' is not in the index"]


def shard_of_norm(folder: Path) -> Path:
    return next(path for path in folder.glob("*.safetensors") if NORM in read_header(path).tensors)


@pytest.mark.parametrize("stored", [NORM, "model.norm.weight"])
def test_tensor_in_two_shards(folder: Path, stored: str) -> None:
    home, other = shard_of(folder, NORM), other_shard(folder, NORM)
    rewrite(other, lambda tensors: tensors.update({stored: ("F32", np.ones(32, np.float32))}))
    what = f"is also in {home.name}" if stored == NORM else "is not in the index"
    assert findings(folder) == [f"{other}: tensor '{stored}' {what}"]


def test_tensor_twice_in_one_file(tmp_path: Path) -> None:
    tensors = {"language_model." + name: array for name, array in tiny.spec_tensors().items()}
    tiny.write_spec_model(tmp_path)
    write_safetensors(
        tmp_path / "model.safetensors", tensors | {"model.norm.weight": np.ones(32, np.float32)}
    )
    (line,) = findings(tmp_path)
    assert line.endswith("tensor 'model.norm.weight' is also in model.safetensors")


def test_tensor_in_another_shard_than_the_index_says(folder: Path) -> None:
    home, other = shard_of(folder, NORM), other_shard(folder, NORM)
    edit_index(folder, lambda index: index["weight_map"].update({NORM: other.name}))
    assert findings(folder) == [f"{home}: tensor '{NORM}' is here, but the index says {other.name}"]


@pytest.mark.parametrize(
    ("name", "stored", "expected"),
    [
        (NORM, ("F32", np.ones(31, np.float32)), "has shape [31], expected [32]"),
        (NORM, ("F32", np.ones((1, 32), np.float32)), "has shape [1, 32], expected [32]"),
        (NORM, ("U8", np.ones(32, np.uint8)), "has dtype U8, expected BF16 or F16 or F32"),
        (NORM, ("F64", np.ones(32)), "has dtype F64, expected BF16 or F16 or F32"),
        (
            EXPERT + "w1.weight_packed",
            ("U8", np.ones((32, 15), np.uint8)),
            "has shape [32, 15], expected [32, 16]",
        ),
        (EXPERT + "w1.weight_scale", ("U8", np.ones((32,), np.uint8)), "has shape [32], expected [32, 1]"),
        (EXPERT + "w1.weight_scale", ("F16", np.ones((32, 1), np.float16)), "has dtype F16, expected U8"),
    ],
)
def test_wrong_shape_or_dtype(folder: Path, name: str, stored: tuple[str, np.ndarray], expected: str) -> None:
    path = shard_of(folder, name)
    rewrite(path, lambda tensors: tensors.update({name: stored}))
    assert findings(folder) == [f"{path}: tensor '{name}' {expected}"]


@pytest.mark.parametrize("entries", [1, 3, 127, 129])
def test_decay_of_another_length(tmp_path: Path, entries: int) -> None:
    name = "model.layers.0.self_attn.A_log"
    tensors = tiny.spec_tensors() | {name: np.zeros(entries, np.float32)}
    (line,) = findings(tiny.write_model(tmp_path, tiny.SPEC_CONFIG, tensors))
    assert line.endswith(f"'language_model.{name}' has shape [{entries}], expected [128]")


def test_bytes_that_do_not_fit_the_shape(folder: Path) -> None:
    """A U8 tensor of the wrong size for its shape is one finding, not also a missing tensor."""
    name = EXPERT + "w2.weight_packed"
    path = shard_of(folder, name)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    changed = content[8 : 8 + length].replace(
        f'"{name}":{{"dtype":"U8","shape":[32,16]'.encode(),
        f'"{name}":{{"dtype":"U8","shape":[32,17]'.encode(),
    )
    path.write_bytes(content[:8] + changed + content[8 + length :])
    assert findings(folder) == [f"{path}: tensor '{name}' has 512 bytes, expected 544 for U8 [32, 17]"]


def test_damaged_header_hides_no_other_finding(folder: Path) -> None:
    content = shard(folder, 1).read_bytes()
    shard(folder, 1).write_bytes(content[:8] + b"!" + content[9:])
    rewrite(shard(folder, 2), lambda tensors: tensors.update(x=("U8", np.zeros(1, np.uint8))))
    os.truncate(shard(folder, 3), shard(folder, 3).stat().st_size - 7)
    lines = findings(folder)
    assert len(lines) == 3
    assert lines[0].startswith(f"{shard(folder, 1)}: header: not valid JSON")
    assert "truncated, 7 bytes" in lines[1]
    assert "'x' is surplus" in lines[2]


def test_ten_findings_and_how_many_more(tmp_path: Path) -> None:
    tensors = tiny.spec_tensors()
    for layer in range(3):
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "mlp_res_norm",
            "self_attention_res_norm",
        ):
            del tensors[f"model.layers.{layer}.{norm}.weight"]
    tiny.write_model(tmp_path, tiny.SPEC_CONFIG, tensors)
    lines = findings(tmp_path)
    assert len(lines) == 11
    assert all(" is missing" in line for line in lines[:10])
    assert lines[10] == "and 2 more"


def test_other_config_is_findings_not_a_crash(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(tiny.config_dict(hidden_size=64, num_experts=7)))
    lines = findings(folder)
    assert len(lines) == 11
    assert lines[10].startswith("and ")


def test_vision_and_prediction_layers_are_skipped_with_a_note(tmp_path: Path) -> None:
    extra = {
        "vision_tower.encoder.blocks.0.wo.weight": np.zeros(3, np.float32),
        "mm_projector.proj.0.weight": np.zeros(3, np.float32),
        "language_model.model.layers.5.input_layernorm.weight": np.zeros(3, np.float32),
        "language_model.model.mtp.norm.weight": np.zeros(3, np.float32),
    }
    tensors = {"language_model." + name: array for name, array in tiny.spec_tensors().items()}
    tiny.write_spec_model(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", tensors | extra)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert len(checkpoint.tensors) == 272
        assert checkpoint.notes == (
            "1 tensors skipped: layers beyond num_hidden_layers",
            "1 tensors skipped: multi-token prediction",
            "2 tensors skipped: vision",
        )


def test_shard_of_vision_only_may_be_absent(folder: Path) -> None:
    edit_index(folder, lambda index: index["weight_map"].update({"vision_tower.x": "vision.safetensors"}))
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.notes == ("vision.safetensors is absent; the text model needs nothing of it",)


def test_collector_runs_again_after_a_census(folder: Path) -> None:
    Checkpoint.open(folder).close()
    assert gc.isenabled()
    shard(folder, 2).unlink()
    findings(folder)
    assert gc.isenabled()
    gc.disable()
    try:
        findings(folder)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_findings_keep_ten_lines_and_count_all() -> None:
    some, more = Findings(), Findings()
    some.raise_if_any()
    for n in range(7):
        some.add(f"some {n}")
    for n in range(25):
        more.add(f"more {n}")
    assert len(more.lines) == 10
    some.extend(more)
    with pytest.raises(ModelFilesError) as caught:
        some.raise_if_any()
    lines = str(caught.value).splitlines()
    assert lines == [*(f"some {n}" for n in range(7)), "more 0", "more 1", "more 2", "and 22 more"]
