"""A server with a small repository, a request for it, a disk that is nearly full."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from k3mlx.download import Request
from tests.hub_server import HubServer

from .served import OTHER, QUICK, SHARD, SIZE, VISION

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    """A repository of an index, two shards of the text model and one of vision only, of random bytes."""
    folder = tmp_path / "served"
    folder.mkdir()
    weights = {"language_model.lm_head.weight": SHARD, "language_model.model.norm.weight": OTHER}
    weights |= {"vision_tower.a": VISION, "mm_projector.b": VISION, "vision_tower.c": SHARD}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (folder / "config.json").write_text('{"model_type": "kimi_k3"}')
    (folder / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    rng = np.random.default_rng(7)
    for number, shard in enumerate((SHARD, OTHER, VISION)):
        (folder / shard).write_bytes(rng.bytes(SIZE + number))
    with HubServer.running(folder) as running:
        yield running


@pytest.fixture
def request_(server: HubServer, tmp_path: Path) -> Request:
    return Request("org/name", local_dir=tmp_path / "m ü", endpoint=server.url, patience=QUICK, offline=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
