"""Parts of a download without a server: who takes which shard, what is wanted, how long a server asks to wait."""

import gzip
import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest

from k3mlx.checkpoint.layout import INDEX_NAME
from k3mlx.download.places import Folder
from k3mlx.download.remote import LONGEST_WAIT, RemoteFile, _wait_asked_for
from k3mlx.download.survey import choose, survey
from k3mlx.errors import ResourceError
from tests.paths import DATA, needs_data

GB = 10**9


def shards(count: int, size: int) -> list[RemoteFile]:
    return [RemoteFile(f"{n:02}.safetensors", size, "sha256", f"{n:064x}") for n in range(count)]


@pytest.fixture
def drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Folder]:
    """Three folders, each as if on a drive of its own."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    stat = Path.stat
    monkeypatch.setattr(
        Path,
        "stat",
        lambda path, **given: SimpleNamespace(st_dev=path.name) if path in folders else stat(path, **given),
    )
    return [Folder(folder, {}) for folder in folders]


def test_shards_go_where_most_room_is(drives: list[Folder]) -> None:
    free = {"a": 25 * GB, "b": 55 * GB, "c": 12 * GB}
    files = [*shards(8, 10 * GB), RemoteFile("config.json", 100, "git", "0" * 40)]
    entries = survey(files, drives, free=lambda path: free[path.name])
    takes = {place.root.name: sum(entry.place is place for entry in entries) for place in drives}
    assert takes == {"a": 3, "b": 5, "c": 1}
    assert entries[0].file.name == "config.json"
    assert entries[0].place is drives[0]


def test_what_does_not_fit_is_told_by_drive(drives: list[Folder]) -> None:
    free = {"a": 25 * GB, "b": 5 * GB, "c": 5 * GB}
    with pytest.raises(ResourceError) as caught:
        survey(shards(4, 10 * GB), drives, free=lambda path: free[path.name])
    text = str(caught.value)
    assert text.startswith("40 GB are still missing and do not fit; free: ")
    assert f"{drives[0].root} 25 GB, {drives[1].root} 5 GB" in text
    assert f"{5 * GB} bytes in {drives[1].root}" in text


def test_folders_of_one_drive_share_its_room(tmp_path: Path) -> None:
    places = [Folder(tmp_path / name, {}) for name in "ab"]
    for place in places:
        place.prepare()
    survey(shards(2, 10 * GB), places, free=lambda path: 20 * GB)
    with pytest.raises(ResourceError):
        survey(shards(2, 10 * GB), places, free=lambda path: 20 * GB - 1)


def test_a_part_counts_and_stays_on_its_drive(drives: list[Folder]) -> None:
    (file,) = shards(1, 100)
    drives[2].prepare()
    drives[2].partial(file).write_bytes(b"x" * 60)
    (entry,) = survey([file], drives, free=lambda path: 40 if path.name == "c" else 10**6)
    assert entry.place is drives[2]
    assert entry.missing == 40
    with pytest.raises(ResourceError, match="1 bytes in"):
        survey([file], drives, free=lambda path: 39)


@pytest.mark.slow
@needs_data
def test_the_released_index_needs_94_of_its_96_shards(tmp_path: Path) -> None:
    packed = DATA / "model.safetensors.index.json.gz"
    (tmp_path / INDEX_NAME).write_bytes(gzip.decompress(packed.read_bytes()))
    names = [f"model-{n:05}-of-000096.safetensors" for n in range(1, 97)]
    files = [RemoteFile(name, 1, "sha256", "0" * 64) for name in [INDEX_NAME, *names]]
    wanted, skipped = choose(files, tmp_path, vision=False)
    assert skipped == dict.fromkeys(names[94:], "vision only")
    assert [file.name for file in wanted] == [INDEX_NAME, *names[:94]]
    assert choose(files, tmp_path, vision=True) == (files, {})


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0"}, 0.0),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "999999999"}, LONGEST_WAIT),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({"RateLimit": '"resolvers";r=0;t=55'}, 55.0),
        ({"RateLimit": '"resolvers";r=0;t=55', "Retry-After": "3"}, 3.0),
        ({}, None),
    ],
)
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert _wait_asked_for(headers) == seconds


def test_a_date_to_wait_for() -> None:
    wait = _wait_asked_for({"Retry-After": formatdate(time.time() + 1000, usegmt=True)})
    assert wait is not None
    assert 900 < wait <= 1000
