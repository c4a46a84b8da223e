"""The files of a model: can each be read, do its links lead where they should, and is every tensor there.

Owns the findings and the command that puts each right. The census itself is `checkpoint.census`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3mlx.checkpoint.census import RENAME
from k3mlx.checkpoint.layout import check_link
from k3mlx.checkpoint.manifest import is_overlay, read_manifest
from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.checkpoint.resume import RECORD, download_command
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.untrusted import FileMissingError, reason, stat_file
from k3mlx.config import ModelConfig, load_config
from k3mlx.errors import K3Error, ModelFilesError
from k3mlx.memory import format_size

from .findings import Finding, fatal, ok, warning

CONVERT = "give the k3mlx convert command that made the overlay again"
READ, ABSENT, REFUSED, STRAY = "read", "absent", "refused", "stray"  # what can come of opening a file
MODEL_SUFFIXES = (".safetensors", ".json", ".model")
PARTIAL = ".incomplete"  # how the name of a file ends that a download has not finished


@dataclass(frozen=True)
class FileState:
    """A file of a snapshot and what came of reading its first byte. problem: one line, unless `state` is READ."""

    path: Path
    state: str
    problem: str = ""


@dataclass(frozen=True)
class Commands:
    """What puts files right. fetch: for what is not there; verify: for what may be damaged; remake: for the own files
    of an overlay, whose experts the other two are about; empty for a snapshot."""

    fetch: str
    verify: str
    remake: str = ""


def commands_for(folder: Path) -> Commands:
    """The commands for a model's folder."""
    overlay, source = is_overlay(folder), folder
    if overlay:
        with contextlib.suppress(K3Error):  # which has its line in the census
            source = read_manifest(folder).experts.folder(folder)
    return Commands(
        download_command(source), download_command(source, verify=True), CONVERT if overlay else ""
    )


def look_at_files(folders: Iterable[Path]) -> list[FileState]:
    """Every file that a model could need in these folders, opened once."""
    found = []
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            found.append(FileState(folder, REFUSED, f"{folder}: cannot be listed ({reason(error)})"))
            continue
        found += [_look_at_file(folder, name) for name in names if name.endswith(MODEL_SUFFIXES)]
    return found


def check_files(files: Sequence[FileState], complete: str) -> Iterator[Finding]:
    """A fatal finding for each file that is there and cannot be used. complete: the command that fetches files."""
    bad = [file for file in files if file.state != READ]
    if not bad:
        yield ok("files", f"{len(files)} files can be read")
    for file in bad:
        yield fatal("file", file.problem, _remedy(file, complete))


def check_partial(partial: Sequence[tuple[Path, int]], complete: str) -> Iterator[Finding]:
    """Downloads that have not ended: files and the bytes that they have."""
    if partial:
        size = format_size(sum(nbytes for _, nbytes in partial))
        lines = [f"{path} {format_size(nbytes)}" for path, nbytes in partial]
        text = f"{len(partial)} files are being downloaded, or their download was interrupted at {size}"
        yield warning("partial", text, complete, lines)


def check_census(
    error: K3Error, folder: Path, known: Sequence[FileState], commands: Commands
) -> Iterator[Finding]:
    """A fatal finding for each line of a census of `folder`, but for files that have had theirs."""
    told = tuple(f"{file.path}:" for file in known if file.state != READ)
    for line in str(error).splitlines():
        if line.startswith(told):
            continue
        if line.startswith(str(folder / "config.json")):
            yield fatal("config", line, commands.remake or commands.verify)
        elif commands.remake and (line.startswith(str(folder)) or "convert again" in line):
            yield fatal("overlay", line, commands.remake)
        else:
            lacking = any(words in line for words in ("shard missing", ": missing, ", ": truncated"))
            command = commands.fetch if lacking else commands.verify
            yield fatal("census", line, f"{RENAME}, or fetch it: {command}" if RENAME in line else command)


def check_model(error: K3Error) -> Finding:
    """There is no such model here."""
    text, _, remedy = str(error).partition("; ")
    return fatal("model", text, remedy or "give --model a folder, or a repository in the Hugging Face cache")


def open_model(folder: Path, elsewhere: Sequence[Path]) -> Checkpoint | K3Error:
    """The checkpoint after its census, or what that found."""
    try:
        return open_checkpoint(folder, elsewhere)
    except K3Error as error:
        return error


def read_config(folder: Path) -> ModelConfig | None:
    """The configuration of a folder whose tensors are not in order, None if it is not either."""
    try:
        return load_config(folder)
    except K3Error:
        return None


def census_line(checkpoint: Checkpoint) -> Finding:
    """What a census counted that found nothing wrong."""
    size = format_size(sum(stamp.size for stamp in checkpoint.stamps.values()))
    tensors, files = len(checkpoint.tensors), len(checkpoint.stamps)
    return ok("census", f"{tensors:,} tensors in {files} files, {size}, none missing", checkpoint.notes)


def find_partial(folder: Path) -> list[tuple[Path, int]]:
    """Unfinished downloads that belong to a snapshot: in the blobs of its cache, or below the folder itself."""
    places = [folder / ".cache" / "huggingface" / "download", folder / RECORD.parent]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    found = []
    for place in places:
        for path in sorted(place.rglob(f"*{PARTIAL}")):
            try:
                found.append((path, path.stat().st_size))
            except OSError:
                continue  # it has just been finished
    return found


def _look_at_file(folder: Path, name: str) -> FileState:
    path = folder / name
    try:
        check_link(folder, path)
    except ModelFilesError as error:
        return FileState(path, STRAY, str(error))
    try:
        stat_file(path)  # no pipe, which would be waited for
        with open(path, "rb") as file:
            file.read(1)
    except FileMissingError:
        target = os.readlink(path) if path.is_symlink() else "nothing"
        return FileState(path, ABSENT, f"{path}: a link to {target}, which is not there")
    except ModelFilesError as error:
        return FileState(path, STRAY, str(error))
    except OSError as error:
        return FileState(path, REFUSED, f"{path}: cannot be read ({reason(error)})")
    return FileState(path, READ)


def _remedy(file: FileState, complete: str) -> str:
    name = shlex.quote(str(file.path))
    return {
        ABSENT: complete,
        REFUSED: f"chmod u+r {name}, as its owner; then run this again",
        STRAY: f"put the file itself in its place, or its folder after --model-dirs, or fetch it: {complete}",
    }[file.state]
