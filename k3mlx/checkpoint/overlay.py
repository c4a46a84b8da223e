"""An overlay: a folder with quantised dense weights that refers to a snapshot for its routed experts.

Owns the opening of one: its own tensors, and the experts in the released files or in repacked ones. What it is made
of is in `manifest.py`; `k3mlx convert` writes overlays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from k3mlx.config import ModelConfig, load_config
from k3mlx.errors import ModelFilesError

from . import names
from .census import Census
from .findings import Findings
from .manifest import REPACKED, ExpertsSource, Manifest, read_manifest
from .quantized import QuantizedInfo
from .safetensors import FileStamp, TensorInfo, read_header
from .snapshot import Checkpoint
from .stored import StoredTensors, derived


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
        for layer in config.moe_layers:
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
