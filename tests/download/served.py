"""What the tests of downloads share: the served repository, runs with quick patience, what must be on disk."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from k3mlx.download import Patience, Request, Result, download
from k3mlx.download.places import STATE
from k3mlx.errors import K3Error
from tests.hub_server import HubServer, sha256

QUICK = Patience(timeout=5.0, attempts=3, first_wait=0.01, longest_wait=0.02)
ONCE = replace(QUICK, attempts=1)
SHARD, OTHER, VISION = (f"model-0000{n}-of-000003.safetensors" for n in (1, 2, 3))
SIZE = 655_361
CUT = 3 << 16  # 30 % of a shard; clients of huggingface_hub below 1.0 hand over 64 KiB at a time

needs_links = pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")


def run(request: Request) -> tuple[Result, str]:
    """The result, and all that was noted."""
    notes: list[str] = []
    result = download(request, lambda meter: notes.extend(meter.take_notes()))
    return result, "\n".join(notes)


def failure(request: Request, kind: type[K3Error] = K3Error) -> str:
    with pytest.raises(K3Error) as caught:
        run(request)
    assert type(caught.value) is kind or (kind is K3Error and caught.value.exit_code == 1)
    return str(caught.value)


def check_files(server: HubServer, folder: Path, *absent: str) -> None:
    """Every served file is there with its bytes, nothing else, and no partial file."""
    wanted = {n: d for n, d in server.files.items() if not n.startswith(".") and n not in absent}
    there = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert there.keys() == wanted.keys()
    for name, data in wanted.items():
        assert there[name] == data, name
    assert not list(folder.rglob("*.incomplete"))


def part(server: HubServer, folder: Path, size: int | None = None) -> Path:
    """The partial file of the first shard, which has `size` bytes."""
    path = folder / STATE / f"{sha256(server.files[SHARD])}.{sha256(SHARD.encode())[:8]}.incomplete"
    assert size is None or path.stat().st_size == size
    return path


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1234] ^= 4
    path.write_bytes(data)
