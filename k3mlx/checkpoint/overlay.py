"""An overlay: a folder with quantised dense weights that refers to a snapshot for its routed experts.

Owns the manifest `overlay.json`, finding the files that hold the experts, and the check that they are still the ones
that the overlay was made for (size, and a hash of the header, of every file). `k3mlx convert` writes overlays.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from k3mlx.config import ModelConfig, load_config
from k3mlx.errors import ModelFilesError

from . import names
from .census import Census
from .findings import Findings
from .quantized import QuantizedInfo
from .safetensors import FileStamp, TensorInfo, read_header
from .snapshot import Checkpoint
from .stored import StoredTensors, derived
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
        places = [overlay / self.relative, Path(self.absolute)]
        for place in places:
            if os.path.isdir(place):
                return Path(os.path.normpath(place))
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


class Experts(Protocol):
    """Where routed experts are, as `Checkpoint` says it."""

    tensors: Mapping[str, TensorInfo]
    stamps: Mapping[Path, FileStamp]
    mxfp4: bool

    def expert_tensors(self, layer: int, expert: int) -> dict[str, TensorInfo]: ...


class OverlayCheckpoint(Checkpoint):
    """Dense weights of an overlay, some as codes (`quantized`), and the experts of the snapshot it refers to."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        census: Census,
        experts: Experts,
        quantized: Mapping[str, QuantizedInfo],
    ) -> None:
        super().__init__(folder, config, census)
        self.quantized = MappingProxyType(dict(quantized))
        self._experts = experts

    def expert_tensors(self, layer: int, expert: int) -> dict[str, TensorInfo]:
        return self._experts.expert_tensors(layer, expert)


def open_overlay(folder: Path, elsewhere: Sequence[Path] = ()) -> OverlayCheckpoint:
    """Read the manifest and every header; reads no tensor data. `elsewhere`: more folders with the snapshot's shards.

    Raises ModelFilesError for an overlay that is not finished or damaged, and, with a line for each finding, for
    experts that are not where they were or not what they were.
    """
    config = load_config(folder)
    manifest = read_manifest(folder)
    if not manifest.complete:
        done, wanted = len(manifest.files), len(manifest.names)
        raise ModelFilesError(
            f"{folder}: {done} of {wanted} files have been converted; finish it with the command that began it"
        )
    dense, quantized, stamps = _dense(folder, config, manifest)
    experts = _open_experts(folder, config, manifest.experts, elsewhere)
    notes = (f"an overlay: experts of {manifest.experts.folder(folder)}",)
    census = Census(dict(experts.tensors) | dense, dict(experts.stamps) | stamps, experts.mxfp4, notes)
    return OverlayCheckpoint(folder, config, census, experts, quantized)


def _dense(
    folder: Path, config: ModelConfig, manifest: Manifest
) -> tuple[dict[str, TensorInfo], dict[str, QuantizedInfo], dict[Path, FileStamp]]:
    """Every dense tensor of the overlay's own files, those with codes also as such, and the files."""
    findings = Findings()
    infos, stamps = _headers(folder, {file.name: file.size for file in manifest.dense}, findings)
    stored = StoredTensors(infos, findings)
    tensors: dict[str, TensorInfo] = {}
    quantized: dict[str, QuantizedInfo] = {}
    for spec in names.dense_specs(config):
        found = stored.find(spec.name, spec.shape, spec.short)
        if isinstance(found, QuantizedInfo):
            quantized[spec.name] = found
            tensors[spec.name] = derived(spec.name, spec.shape, [found])
        elif found is not None:
            if found.dtype not in spec.dtypes:
                findings.add(
                    f"{found.path}: tensor '{spec.name}' has dtype {found.dtype}, expected {spec.dtypes[0]}"
                )
            tensors[spec.name] = found
    stored.report_surplus(stored.left)
    findings.raise_if_any()
    return tensors, quantized, stamps


def _headers(
    folder: Path, sizes: Mapping[str, int], findings: Findings
) -> tuple[dict[str, TensorInfo], dict[Path, FileStamp]]:
    infos: dict[str, TensorInfo] = {}
    stamps: dict[Path, FileStamp] = {}
    for name, size in sizes.items():
        path = folder / name
        try:
            header = read_header(path, findings)
        except ModelFilesError as error:
            findings.add(str(error))
            continue
        stamps[path] = header.stamp
        if header.stamp.size != size:
            findings.add(f"{path}: {header.stamp.size} bytes, expected {size}; convert again")
        for info in header.tensors.values():
            if info.name in infos:
                findings.add(f"{path}: tensor '{info.name}' is also in {infos[info.name].path.name}")
            infos[info.name] = info
    return infos, stamps


def _open_experts(
    overlay: Path, config: ModelConfig, source: ExpertsSource, elsewhere: Sequence[Path]
) -> Experts:
    folder = source.folder(overlay)
    if source.layout == REPACKED:
        source.check(
            {file.name: folder / file.name for file in source.files if (folder / file.name).exists()}
        )
        return RepackedExperts(folder, config, [file.name for file in source.files])
    with Checkpoint.open(folder, config, elsewhere) as snapshot:
        source.check({path.name: path for path in snapshot.stamps})
        return snapshot


class RepackedExperts:
    """Experts in files of their own, under their released names, as `k3mlx convert --experts-to` writes them."""

    def __init__(self, folder: Path, config: ModelConfig, files: Iterable[str]) -> None:
        findings = Findings()
        sizes = {name: (folder / name).stat().st_size for name in files}
        infos, stamps = _headers(folder, sizes, findings)
        self.tensors: Mapping[str, TensorInfo] = infos
        self.stamps: Mapping[Path, FileStamp] = stamps
        self.mxfp4 = any(name.endswith(".weight_packed") for name in infos)
        self._parts = names.expert_parts(config, self.mxfp4)
        for layer in filter(config.is_moe, range(config.num_hidden_layers)):
            for expert in range(config.num_experts):
                self._check(layer, expert, findings)
        findings.raise_if_any()

    def expert_tensors(self, layer: int, expert: int) -> dict[str, TensorInfo]:
        prefix = names.expert_prefix(layer, expert)
        return {part: self.tensors[prefix + part] for part in self._parts}

    def _check(self, layer: int, expert: int, findings: Findings) -> None:
        prefix = names.expert_prefix(layer, expert)
        for part, spec in self._parts.items():
            info = self.tensors.get(prefix + part)
            if info is None:
                findings.add(f"tensor '{prefix}{part}' is missing, expected {list(spec.shape)}")
            elif info.shape != spec.shape or info.dtype not in spec.dtypes:
                findings.add(
                    f"{info.path}: tensor '{info.name}' is {info.dtype} {list(info.shape)},"
                    f" expected {spec.dtypes[0]} {list(spec.shape)}"
                )
