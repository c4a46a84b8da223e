"""Where files of a download lie: a folder, or a repository in the Hugging Face cache.

A file is written beside its place under its digest and renamed when its hash is right, so a name never holds a
part. Owns paths and renames; knows nothing of the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .remote import RemoteFile

STATE = ".k3mlx"  # the folder of record, lock and (outside the cache) partial files


class Folder:
    """A plain folder with the files under their names; `verified` says which had this digest once."""

    def __init__(self, root: Path, verified: Mapping[str, str]) -> None:
        self.root = self.folder = root
        self._verified = verified

    def prepare(self) -> None:
        (self.root / STATE).mkdir(parents=True, exist_ok=True)

    def stored(self, file: RemoteFile) -> Path:
        """Where the bytes of a whole file are, or will be."""
        return self.root / file.name

    def partial(self, file: RemoteFile) -> Path:
        name = hashlib.sha256(file.name.encode()).hexdigest()[:8]  # two files may have the same bytes
        return self.root / STATE / f"{file.digest}.{name}.incomplete"

    def trusts(self, file: RemoteFile) -> bool:
        """Whether a file of the right size here need not be hashed."""
        return self._verified.get(file.name) == file.digest

    def publish(self, file: RemoteFile) -> None:
        """Give a complete partial file its name."""
        self.stored(file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.partial(file), self.stored(file))

    def link(self, file: RemoteFile, twins: Sequence[RemoteFile] = ()) -> None:
        """Copy a stored file for `twins`, files with the same bytes that are not here yet."""
        for twin in twins:
            if bytes_of(self.stored(twin)) != twin.size:
                shutil.copyfile(self.stored(file), self.stored(twin))


def cache_root(cache: Path, repo: str) -> Path:
    """The folder of a repository in the cache."""
    return cache / f"models--{repo.replace('/', '--')}"


class CachedRepository:
    """A repository in the cache, as huggingface_hub lays it out: blobs by digest, and a snapshot of links."""

    def __init__(self, root: Path, commit: str) -> None:
        self.root = root
        self.folder = root / "snapshots" / commit

    def prepare(self) -> None:
        for folder in (self.root / STATE, self.root / "blobs", self.folder):
            folder.mkdir(parents=True, exist_ok=True)

    def stored(self, file: RemoteFile) -> Path:
        named = self.folder / file.name
        if named.is_file() and not named.is_symlink():  # a system without links
            return named
        return self.root / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        return self.root / "blobs" / f"{file.digest}.k3mlx.incomplete"

    def trusts(self, file: RemoteFile) -> bool:
        return True  # whoever writes here renames after checking

    def publish(self, file: RemoteFile) -> None:
        os.replace(self.partial(file), self.stored(file))

    def link(self, file: RemoteFile, twins: Sequence[RemoteFile] = ()) -> None:
        """Show a stored file in the snapshot under its name and those of `twins`, files with the same bytes.

        Where links are not allowed it is moved there, and copied for the twins.
        """
        for twin in twins:
            self._link(self.stored(file), self.folder / twin.name, shutil.copyfile)
        if self.stored(file) != self.folder / file.name:
            self._link(self.stored(file), self.folder / file.name, os.replace)

    def _link(self, blob: Path, named: Path, instead: Callable[[Path, Path], object]) -> None:
        named.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(blob, named.parent)
        if named.is_symlink() and os.readlink(named) == target:
            return
        named.unlink(missing_ok=True)
        try:
            named.symlink_to(target)
        except OSError:
            instead(blob, named)

    def name_revision(self, revision: str, commit: str) -> None:
        """Let `revision` mean this snapshot, for every user of the cache."""
        if revision != commit:
            path = self.root / "refs" / revision
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)


Place = Folder | CachedRepository


def bytes_of(path: Path) -> int | None:
    """The size of a file; None if there is none."""
    with contextlib.suppress(OSError):
        if path.is_file():
            return path.stat().st_size
    return None


def set_aside(place: Place, file: RemoteFile) -> None:
    """A file that is not whole gives up its name: a short one becomes the partial file, others are removed."""
    stored, partial = place.stored(file), place.partial(file)
    size, part = bytes_of(stored), bytes_of(partial) or 0
    longer = size is not None and (part < size or part > file.size) and size < file.size
    if longer and not stored.is_symlink():
        os.replace(stored, partial)
    else:
        stored.unlink(missing_ok=True)
