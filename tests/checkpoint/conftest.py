"""A complete small snapshot for each test, to be damaged."""

import shutil
from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_spec_model(tmp_path_factory.mktemp("made"), shards=3)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The specification's model in three shards, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "model"))
