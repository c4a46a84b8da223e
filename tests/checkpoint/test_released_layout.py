"""The released layout of 497,220 tensors in 96 shards, without its weights: damage is named, limits are kept.

Limits are on memory, which a busy machine does not change; times are measured, not asserted.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.errors import ModelFilesError
from tests.paths import DATA, needs_data
from tests.scripts_at import script

pytestmark = [pytest.mark.slow, needs_data]
TOTAL = 1_560_860_324_864
LAYER_1 = 16_990_092_800
NORM = "language_model.model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = script("make_sparse")
    folder = tmp_path_factory.mktemp("sparse")
    sizes = made.make_sparse(folder, DATA / "config.json", DATA / "model.safetensors.index.json.gz")
    assert sizes.apparent == 1_560_936_091_448  # of the released files, headers included
    assert sizes.real < 300_000_000
    return folder


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-000096.safetensors"


def findings(folder: Path) -> list[str]:
    with pytest.raises(ModelFilesError) as caught:
        open_checkpoint(folder)
    return str(caught.value).splitlines()


@contextmanager
def moved(path: Path, to: Path) -> Iterator[None]:
    path.rename(to)
    try:
        yield
    finally:
        to.rename(path)


def test_it_is_complete(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert len(checkpoint.tensors) == 497_052
        assert checkpoint.notes == ("168 tensors skipped: vision",)
        assert len(checkpoint.expert_spans(92, 895)) == 1


def test_a_missing_shard(folder: Path, tmp_path: Path) -> None:
    with moved(shard(folder, 2), folder.parent / "aside"):
        assert findings(folder) == [f"{shard(folder, 2)}: shard missing, {LAYER_1} bytes"]
        assert f"k3mlx download moonshotai/Kimi-K3 --local-dir {folder}" in doctor(folder)


def test_a_renamed_shard(folder: Path) -> None:
    with moved(shard(folder, 2), folder / "part2.safetensors"):
        assert findings(folder) == [
            f"{shard(folder, 2)}: shard missing, {LAYER_1} bytes"
            " (its tensors are in 'part2.safetensors': rename that file)"
        ]


def test_a_shard_cut_by_one_byte(folder: Path) -> None:
    path = shard(folder, 3)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    try:
        assert findings(folder) == [
            f"{path}: truncated, 1 bytes are missing ({size - 1} present, {size} expected)"
        ]
    finally:
        os.truncate(path, size)


def test_a_tensor_twice(folder: Path) -> None:
    """A norm of layer 1 takes the place of one of layer 2, which has as many bytes."""
    path = shard(folder, 3)
    with open(path, "r+b") as file:
        head = file.read(2_000_000)
        other = NORM.replace("layers.1", "layers.2")
        assert head.count(f'"{other}"'.encode()) == 1
        file.seek(head.index(f'"{other}"'.encode()))
        file.write(f'"{NORM}"'.encode())
    try:
        assert findings(folder) == [
            f"{path}: tensor '{NORM}' is also in {shard(folder, 2).name}",
            f"{path}: tensor '{other.removeprefix('language_model.')}' is missing, BF16 [7168], 14336 bytes"
            " (the index names it here)",
        ]
    finally:
        with open(path, "r+b") as file:
            file.write(head)


def doctor(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "k3mlx", "doctor", "--model", str(folder), "--backend", "numpy"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        (
            "from k3mlx.cli import main; assert main(['plan', '--model', FOLDER, '--json', os.devnull]) in (0, 4)",
            500,
        ),
        ("from k3mlx.checkpoint.mlx_lm import open_checkpoint; open_checkpoint(Path(FOLDER)).close()", 700),
    ],
)
def test_memory(folder: Path, code: str, limit: int) -> None:
    """At most so many megabytes, of the whole process."""
    script = (
        f"import os; from pathlib import Path; FOLDER = {str(folder)!r}; {code};"
        " from k3mlx.memory import peak_memory_bytes; print(peak_memory_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < limit * 10**6


def test_plan_tells_the_vision_part_from_the_index(folder: Path) -> None:
    command = [sys.executable, "-m", "k3mlx", "plan", "--model", str(folder), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    totals = json.loads(done.stdout)["total_bytes"]
    assert totals["index"] == TOTAL
    assert totals["other tensors of the index (vision)"] == 894_717_952
