"""What of a repository is wanted, what of it is here already, and which folder takes what is missing.

Looks at names, sizes and free space; reads only the index. Changes nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from k3mlx.checkpoint.layout import INDEX_NAME, find_layout
from k3mlx.checkpoint.names import skip_reason, strip_prefix
from k3mlx.errors import ResourceError
from k3mlx.memory import format_size

from .places import Place, bytes_of
from .remote import RemoteFile

_ALL_LAYERS = 1 << 60


class Entry(NamedTuple):
    """A wanted file: where it is or goes, how many of its bytes are there, and what is to be done.

    twins: files with the same bytes that are stored once with it, as the cache does.
    """

    file: RemoteFile
    place: Place
    here: int  # bytes
    whole: bool
    hash_it: bool  # whole by size, but nobody has checked its content
    twins: tuple[RemoteFile, ...] = ()

    @property
    def to_hash(self) -> int:
        """Bytes that are here and are read before anything else is done with them."""
        return self.here if self.hash_it or not self.whole else 0

    @property
    def missing(self) -> int:
        return self.file.size - self.here


def choose(
    files: Iterable[RemoteFile], folder: Path, vision: bool
) -> tuple[list[RemoteFile], dict[str, str]]:
    """The files that are wanted, and why the others are not, by name. `folder` holds the index if there is one.

    Not wanted are shards that hold nothing but the vision tower, and safetensors that the index does not name.
    """
    files = list(files)
    if not any(file.name == INDEX_NAME for file in files):
        return files, {}
    needed: dict[str, bool] = {}
    for tensor, shard in find_layout(folder).weight_map.items():
        only_vision = skip_reason(strip_prefix(tensor), _ALL_LAYERS) == "vision"
        needed[shard] = needed.get(shard, False) or not only_vision
    skipped = {}
    for file in filter(is_shard, files):
        if file.name not in needed:
            skipped[file.name] = "not in the index"
        elif not (needed[file.name] or vision):
            skipped[file.name] = "vision only"
    return [file for file in files if file.name not in skipped], skipped


def is_shard(file: RemoteFile) -> bool:
    return file.name.endswith(".safetensors")


def survey(
    files: Iterable[RemoteFile],
    places: Sequence[Place],
    verify: bool = False,
    free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> list[Entry]:
    """Where each file is or goes: shards in any place, the rest in the first.

    A shard of which a part is somewhere goes on there. Others go, largest first, where most room is left.
    Raises ResourceError when they do not fit. free: bytes that can be written where a path is.
    """
    files = sorted(files, key=is_shard)  # what is small and needed first comes first
    files, twins = _apart(files, places[0])
    found = [_find(file, places if is_shard(file) else places[:1], verify) for file in files]
    room = _Room(places, free)
    for entry in filter(None, found):
        room.take(entry.place, entry.missing)
    placed = {}
    pending = [file for file, entry in zip(files, found, strict=True) if entry is None]
    for file in sorted(pending, key=lambda file: -file.size):
        place = room.widest(places) if is_shard(file) else places[0]
        room.take(place, file.size)
        placed[file.name] = Entry(file, place, 0, False, False)
    room.check()
    entries = [entry or placed[file.name] for file, entry in zip(files, found, strict=True)]
    return [entry._replace(twins=tuple(twins.get(entry.file.name, ()))) for entry in entries]


def _apart(files: list[RemoteFile], main: Place) -> tuple[list[RemoteFile], dict[str, list[RemoteFile]]]:
    """One file of each that `main` stores in the same place, and the others by that one's name."""
    first: dict[Path, RemoteFile] = {}
    twins: dict[str, list[RemoteFile]] = {}
    for file in files:
        kept = first.setdefault(main.stored(file), file)
        if kept is not file:
            twins.setdefault(kept.name, []).append(file)
    return list(first.values()), twins


def _find(file: RemoteFile, places: Sequence[Place], verify: bool) -> Entry | None:
    """The place that has all of a file, else the one that has most of it."""
    best: Entry | None = None
    for place in places:
        size = bytes_of(place.stored(file))
        if size == file.size:
            return Entry(file, place, size, True, verify or not place.trusts(file))
        part = bytes_of(place.partial(file)) or 0
        here = max(part if part <= file.size else 0, size if size is not None and size < file.size else 0)
        if (size is not None or here) and (best is None or here > best.here):
            best = Entry(file, place, here, False, False)
    return best


class _Room:
    """Free bytes of each drive, less what has been promised to it."""

    def __init__(self, places: Sequence[Place], free: Callable[[Path], int]) -> None:
        self._drives = {place.root: place.root.stat().st_dev for place in places}
        self._free = {self._drives[place.root]: free(place.root) for place in places}
        self._left = dict(self._free)
        self._missing = 0

    def take(self, place: Place, size: int) -> None:
        self._left[self._drives[place.root]] -= size
        self._missing += size

    def widest(self, places: Sequence[Place]) -> Place:
        return max(places, key=lambda place: self._left[self._drives[place.root]])

    def check(self) -> None:
        short = {drive: -left for drive, left in self._left.items() if left < 0}
        if not short:
            return
        roots = {drive: root for root, drive in reversed(self._drives.items())}
        free = ", ".join(f"{roots[drive]} {format_size(size)}" for drive, size in self._free.items())
        lacking = ", ".join(f"{size} bytes in {roots[drive]}" for drive, size in short.items())
        raise ResourceError(
            f"{format_size(self._missing)} are still missing and do not fit; free: {free}."
            f" Free {lacking}, or name folders on other drives with --dirs"
        )
