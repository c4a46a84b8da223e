"""The conversion of a snapshot: what is written where, by several workers, and what a run goes on from.

A file appears under its name only when it is complete; the manifest says which are, with their hashes. A run that was
stopped, even by kill -9, is gone on with by the same command: files of the manifest are checked against their hashes
and kept, anything else is written again. The bytes depend on source and settings only.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3mlx.checkpoint.layout import check_link, find_layout
from k3mlx.checkpoint.manifest import (
    MANIFEST,
    RELEASED,
    REPACKED,
    ExpertsSource,
    FileIdentity,
    Manifest,
    WrittenFile,
    is_overlay,
    read_manifest,
)
from k3mlx.checkpoint.mlx_lm import is_conversion
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.untrusted import parse_json, read_bounded
from k3mlx.checkpoint.writer import replacing
from k3mlx.config import CONFIG_BYTES_MAX
from k3mlx.errors import UsageError

from . import folders
from .dense import Planned, dense_entries, write_dense
from .files import Target, Write, finished, write_all
from .formats import Formats, dense_files
from .repack import experts_entries, experts_files, write_experts

SMALL_FILES = ("tiktoken.model", "*.json", "*.jinja", "LICENSE*", "NOTICE*")  # beside config and weights
SMALL_MAX = 64 << 20  # bytes of such a file
Progress = Callable[[int, int], None]  # bytes written so far, bytes to write


@dataclass
class Job:
    """A conversion of the snapshot `source` to the overlay `out`; opened by `prepare`, done by `run`.

    experts_to: a folder for repacked experts, None to leave them where they are. elsewhere: more folders with shards.
    """

    source: Path
    out: Path
    formats: Formats
    workers: int = 1
    experts_to: Path | None = None
    elsewhere: Sequence[Path] = ()

    def run(self, progress: Progress = lambda done, total: None) -> Manifest:
        """Write what is not there yet, and return the manifest of the finished overlay.

        Raises UsageError for a folder that is something else or was begun in another way, ResourceError when
        the disk is too small, ModelFilesError for a source that cannot be converted.
        """
        _check_source(self.source, self.elsewhere)
        _check_apart(self.source, self.out)
        with ExitStack() as stack:
            checkpoint = stack.enter_context(Checkpoint.open(self.source, elsewhere=self.elsewhere))
            stack.enter_context(folders.claimed(self.out, MANIFEST))
            if self.experts_to is not None and self.experts_to.resolve() != self.out.resolve():
                stack.enter_context(folders.claimed(self.experts_to, "experts-*.safetensors"))
            dense, experts = self._dense(checkpoint), self._experts(checkpoint)
            manifest = self._begun(self._manifest(checkpoint, dense, experts))
            return self._write(dense + experts, manifest, progress)

    def _dense(self, checkpoint: Checkpoint) -> list[Target]:
        """The overlay's own files; the largest, which lies outside the layers, first."""
        return [
            _dense_target(
                self.out / name, checkpoint, [Planned(spec, self.formats.of(spec, kind)) for spec in specs]
            )
            for name, kind, specs in dense_files(checkpoint.config)
        ]

    def _experts(self, checkpoint: Checkpoint) -> list[Target]:
        """The files of repacked experts, if that is wanted."""
        if self.experts_to is None:
            return []
        return [
            _experts_target(self.experts_to / name, checkpoint, layer)
            for name, layer in experts_files(checkpoint.config)
        ]

    def _manifest(
        self, checkpoint: Checkpoint, dense: Sequence[Target], experts: Sequence[Target]
    ) -> Manifest:
        """Of this job before anything is written."""
        shards = {info.path for info in checkpoint.tensors.values()}  # not those with nothing but vision
        source = tuple(map(FileIdentity.of, sorted(shards, key=lambda path: path.name)))
        folder, layout, holders = self.source, RELEASED, source
        if self.experts_to is not None:
            folder, layout, holders = self.experts_to, REPACKED, tuple(map(Target.identity, experts))
        settings = {
            "bits": self.formats.bits,
            "group_size": self.formats.group_size,
            "source": hashlib.sha256(json.dumps(source).encode()).hexdigest(),
        }
        place = ExpertsSource(layout, folders.relative(folder, self.out), str(folder.resolve()), holders)
        return Manifest(settings, place, tuple(target.path.name for target in (*dense, *experts)), ())

    def _begun(self, planned: Manifest) -> Manifest:
        """The job's manifest with what an earlier run has on record."""
        if not is_overlay(self.out):
            return planned
        earlier = read_manifest(self.out)
        if earlier.settings != planned.settings:
            what = (
                "from another source"
                if earlier.settings.get("source") != planned.settings["source"]
                else (f"with bits {_shown(earlier.settings)}, not {_shown(planned.settings)}")
            )
            raise UsageError(f"{self.out}: was begun {what}; use another folder, or remove this one")
        return replace(planned, files=earlier.files)

    def _write(self, targets: Sequence[Target], manifest: Manifest, progress: Progress) -> Manifest:
        records = {file.name: file for file in manifest.files}
        kept = finished(targets, records, self.workers)
        left = [target for target in targets if target.path.name not in kept]
        folders.check_room((target.path, target.size) for target in left)
        manifest = replace(manifest, files=tuple(kept.values()))
        if not left and is_overlay(self.out) and read_manifest(self.out) == manifest:
            return manifest
        with folders.reported(self.out):
            manifest.write(self.out)
            self._copy_small_files()

        def done(target: Target, record: WrittenFile) -> None:
            nonlocal manifest
            kept[target.path.name] = record
            manifest = replace(manifest, files=tuple(kept[name] for name in manifest.names if name in kept))
            with folders.reported(self.out):
                manifest.write(self.out)

        write_all(left, self.workers, done, progress)
        return manifest

    def _copy_small_files(self) -> None:
        """Vocabulary and the like, as they are, and the configuration with a line on what was quantised."""
        skipped = {"config.json", "model.safetensors.index.json"}
        for pattern in SMALL_FILES:
            for path in sorted(self.source.glob(pattern)):
                if path.name not in skipped and path.is_file() and path.stat().st_size <= SMALL_MAX:
                    check_link(self.source, path)
                    with replacing(self.out / path.name) as file:
                        file.write(read_bounded(path, SMALL_MAX))
        path = self.source / "config.json"
        config: Any = parse_json(read_bounded(path, CONFIG_BYTES_MAX), str(path))
        bits, _ = Counter(self.formats.bits.values()).most_common(1)[0]
        block = {
            "mode": "affine",
            "bits": bits,
            "group_size": self.formats.group_size,
            "parts": self.formats.bits,
        }
        with replacing(self.out / "config.json") as file:
            file.write(json.dumps(config | {"quantization": block}, indent=1, ensure_ascii=False).encode())


def _check_source(folder: Path, elsewhere: Sequence[Path]) -> None:
    if is_overlay(folder):
        raise UsageError(f"{folder} is an overlay already; give the snapshot that it was made from")
    if is_conversion(find_layout(folder, elsewhere)):
        raise UsageError(f"{folder} is a conversion by mlx-lm; expected a snapshot as released")


def _check_apart(source: Path, out: Path) -> None:
    if out.resolve() == source.resolve():
        raise UsageError(f"--out {out}: the snapshot itself; expected a folder of its own")


def _shown(settings: Any) -> str:
    return (
        ", ".join(f"{part} {bits}" for part, bits in settings["bits"].items())
        + f" / {settings['group_size']}"
    )


def _dense_target(path: Path, checkpoint: Checkpoint, planned: list[Planned]) -> Target:
    return Target.of(
        path, dense_entries(checkpoint, planned), lambda write: write_dense(checkpoint, planned, write)
    )


def _experts_target(path: Path, checkpoint: Checkpoint, layer: int) -> Target:
    def produce(write: Write) -> dict[str, float]:
        write_experts(checkpoint, layer, write)
        return {}

    return Target.of(path, experts_entries(checkpoint, layer), produce)
