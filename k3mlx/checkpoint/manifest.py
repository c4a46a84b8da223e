"""The manifest of an overlay, `overlay.json`: its files, how it was made, and the files that hold the experts.

Owns the check that those are still the ones that the overlay was made for: the size and a hash of the header of each.
Opens no tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from k3mlx.errors import ModelFilesError

from .findings import Findings
from .untrusted import parse_json, read_bounded, reason, shown
from .writer import replacing

MANIFEST = "overlay.json"
MANIFEST_MAX = 64 << 20  # bytes
FORMAT = "k3mlx overlay 1"
RELEASED, REPACKED = "released", "repacked"  # how the files with the experts are laid out


class FileIdentity(NamedTuple):
    """What tells that a safetensors file is the one that was converted: its size, sha256 of its header."""

    name: str
    size: int
    header: str

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Of a file as it is now. Raises ModelFilesError when it cannot be read."""
        try:
            with open(path, "rb") as file:
                prefix = file.read(8)
                header = file.read(min(int.from_bytes(prefix, "little"), path.stat().st_size))
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ModelFilesError(f"{path}: cannot be read ({reason(error)})") from None
        return cls(path.name, size, hashlib.sha256(prefix + header).hexdigest())


@dataclass(frozen=True)
class ExpertsSource:
    """The files with the routed experts: their folder, seen from the overlay and from the root, and what they are."""

    layout: str
    relative: str
    absolute: str
    files: tuple[FileIdentity, ...]

    def folder(self, overlay: Path) -> Path:
        """Where they are now: the folder may have moved with the overlay, or the overlay alone.

        Raises ModelFilesError if it is in neither place.
        """
        for place in (overlay / self.relative, Path(self.absolute)):
            if any(os.path.exists(place / file.name) for file in self.files):
                return place.resolve()
        raise ModelFilesError(
            f"{overlay}: the experts of this overlay are not at {self.absolute};"
            f" put that folder back, or tell where it is now with: k3mlx convert --model FOLDER -o {overlay}"
        )

    def check(self, paths: Mapping[str, Path]) -> None:
        """Raise ModelFilesError, a line each, for files (by name) that are not those that were converted."""
        findings = Findings()
        for expected in self.files:
            path = paths.get(expected.name)
            if path is None:
                findings.add(
                    f"{expected.name}: missing, {expected.size} bytes, that the overlay was made for"
                )
                continue
            found = FileIdentity.of(path)
            if found != expected:
                what = "its header is another"
                if found.size != expected.size:
                    what = f"{found.size} bytes, expected {expected.size}"
                findings.add(f"{path}: changed since the overlay was made ({what}); convert again")
        findings.raise_if_any()


@dataclass(frozen=True)
class WrittenFile:
    """A finished file; `errors` are relative errors of the matrices that were quantised."""

    name: str
    size: int
    sha256: str
    errors: Mapping[str, float]


@dataclass(frozen=True)
class Manifest:
    """What an overlay is made of. `names` are all files to be written, repacked experts too, `files` the finished ones.

    `settings` is how it was made: what has been begun with some is finished with the same.
    """

    settings: Mapping[str, Any]
    experts: ExpertsSource
    names: tuple[str, ...]
    files: tuple[WrittenFile, ...]

    @property
    def complete(self) -> bool:
        return len(self.files) == len(self.names)

    @property
    def dense(self) -> tuple[WrittenFile, ...]:
        """The finished files in the overlay's own folder."""
        experts = {file.name for file in self.experts.files}
        return tuple(file for file in self.files if file.name not in experts)

    def write(self, folder: Path) -> None:
        """Put it in its place in one step."""
        text = json.dumps({"format": FORMAT, **_plain(self)}, indent=1, ensure_ascii=False)
        with replacing(folder / MANIFEST) as file:
            file.write(text.encode())


def _plain(manifest: Manifest) -> dict[str, Any]:
    experts = asdict(manifest.experts)
    experts["files"] = [file._asdict() for file in manifest.experts.files]
    return {
        "settings": dict(manifest.settings),
        "experts": experts,
        "names": list(manifest.names),
        "files": [{**vars(file), "errors": dict(file.errors)} for file in manifest.files],
    }


def is_overlay(folder: Path) -> bool:
    """Whether a folder has an overlay's manifest, of a finished one or not."""
    return os.path.lexists(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Read and check `overlay.json`. Raises ModelFilesError for anything that is not one."""
    path = folder / MANIFEST
    value = parse_json(read_bounded(path, MANIFEST_MAX), str(path))
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        got = shown(value.get("format") if isinstance(value, dict) else value)
        raise ModelFilesError(
            f"{path}: format is {got}, expected {FORMAT!r}; convert again with this version"
        )
    try:
        experts = value["experts"]
        files = [
            WrittenFile(_name(f["name"]), int(f["size"]), str(f["sha256"]), dict(f["errors"]))
            for f in value["files"]
        ]
        source = ExpertsSource(
            str(experts["layout"]), str(experts["relative"]), str(experts["absolute"]),
            tuple(FileIdentity(_name(f["name"]), int(f["size"]), str(f["header"])) for f in experts["files"]),
        )  # fmt: skip
        return Manifest(dict(value["settings"]), source, tuple(map(_name, value["names"])), tuple(files))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(f"{path}: damaged ({type(error).__name__}: {error}); convert again") from None


def _name(value: Any) -> str:
    """A file name that stays in its folder."""
    if (
        not isinstance(value, str)
        or not value.isprintable()
        or any(c in value for c in "/\\:")
        or value[:1] in ("", ".")
    ):
        raise ValueError(f"{shown(value)} is not the name of a file")
    return value
