"""The command that a message tells the user to run: the right repository, folder, commit and cache."""

import json
from pathlib import Path

import pytest

from k3mlx.checkpoint.hub import resolve
from k3mlx.checkpoint.resume import RECORD, download_command

COMMIT = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def record(root: Path, **fields: object) -> None:
    (root / RECORD).parent.mkdir(parents=True)
    (root / RECORD).write_text(json.dumps(fields))


def test_a_folder_is_named_with_its_repository(tmp_path: Path) -> None:
    record(tmp_path / "two words ü", repo="org/name")
    expected = f"k3mlx download org/name --local-dir '{tmp_path}/two words ü'"
    assert download_command(tmp_path / "two words ü") == expected


def test_a_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert download_command(Path("m")) == f"k3mlx download moonshotai/Kimi-K3 --local-dir {tmp_path}/m"


def test_damage_is_looked_for_when_sizes_say_nothing(tmp_path: Path) -> None:
    command = download_command(tmp_path, verify=True)
    assert command == f"k3mlx download moonshotai/Kimi-K3 --local-dir {tmp_path} --verify"


@pytest.mark.parametrize("text", ["", "[]", '{"repo": 5}', '{"repo": "--json"}', "[" * 100_000, "\0"])
def test_a_record_that_says_nothing_is_no_error(tmp_path: Path, text: str) -> None:
    record(tmp_path)
    (tmp_path / RECORD).write_text(text)
    assert download_command(tmp_path) == f"k3mlx download moonshotai/Kimi-K3 --local-dir {tmp_path}"


def test_a_snapshot_of_the_cache(cache: Path) -> None:
    snapshot = cache / "models--org--na--me" / "snapshots" / COMMIT
    assert download_command(snapshot) == f"k3mlx download org/na--me --revision {COMMIT}"
    record(snapshot.parents[1], repo="org/na--me", commit=COMMIT)
    assert download_command(snapshot) == "k3mlx download org/na--me"


def test_a_snapshot_of_another_cache(cache: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "o ther" / "models--org--name" / "snapshots" / COMMIT
    expected = f"HF_HUB_CACHE='{tmp_path}/o ther' k3mlx download org/name --revision {COMMIT}"
    assert download_command(snapshot) == expected


def test_the_model_in_the_package_is_not_on_the_hub() -> None:
    assert download_command(resolve()).startswith("pip install")
