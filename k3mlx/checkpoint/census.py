"""Comparing the files of a snapshot with its index and its configuration before anything is computed.

Every problem is found in one pass over the headers and told in one error. Reads no tensor data.
"""

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from k3mlx.errors import ModelFilesError

from . import names
from .findings import LINES_MAX, Findings
from .layout import Layout, check_link, find_layout
from .resume import download_command
from .safetensors import FileStamp, Header, TensorInfo, read_header
from .untrusted import FileMissingError, shown

if TYPE_CHECKING:
    from k3mlx.config import ModelConfig


RENAME = "rename that file"  # at the end of a finding: nothing need be fetched


class Census(NamedTuple):
    """What a complete snapshot holds: the text model's tensors by name (prefix stripped), and its files."""

    tensors: dict[str, TensorInfo]
    stamps: dict[Path, FileStamp]
    mxfp4: bool
    notes: tuple[str, ...]


def take_census(
    folder: Path, config: "ModelConfig", elsewhere: Sequence[Path] = (), layout: Layout | None = None
) -> Census:
    """Read every header in `folder` (shards may also be in folders `elsewhere`); check index and config.

    layout: what `find_layout` has said of these folders. Raises ModelFilesError with a line for each finding, at
    most 10 and then "and N more": missing shards (one finding each) and truncated files with the bytes that are
    missing, damaged headers, tensors missing, surplus, twice, misplaced, or of wrong shape or dtype.
    """
    with _collector_paused():
        count = _Count(layout or find_layout(folder, elsewhere), config)
        count.read_shards()
    by_size = count.tensor_findings.count == 0 and not count.damaged
    count.findings.extend(count.tensor_findings)
    if count.findings.count:
        command = download_command(folder, verify=not by_size)
        count.findings.raise_if_any(advice=f"fetch what is missing or damaged: {command}")
    skipped = [f"{number} tensors skipped: {why}" for why, number in sorted(count.skipped.items())]
    return Census(count.tensors, count.stamps, count.expected.mxfp4, (*count.notes, *skipped))


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Half a million small objects in no cycle: the collector would double the time it takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Expected:
    """The tensors a configuration calls for, found by name without listing half a million of them."""

    def __init__(self, config: "ModelConfig", mxfp4: bool) -> None:
        self.mxfp4 = mxfp4
        self._dense = {spec.name: spec for spec in names.dense_specs(config)}
        parts = names.expert_parts(config, mxfp4)
        self._layers = {names.layer_prefix(layer).removesuffix(".") for layer in config.moe_layers}
        self._experts = {
            f"{e}.{part}": spec for e in range(config.num_experts) for part, spec in parts.items()
        }
        self.count = len(self._dense) + len(self._layers) * len(self._experts)

    def find(self, name: str) -> names.TensorSpec | None:
        layer, word, expert = name.partition(names.EXPERTS)
        if word and layer in self._layers:
            return self._experts.get(expert)
        return self._dense.get(name)


class _Count:
    """The state of one census: findings about files, findings about tensors, and what is in order."""

    def __init__(self, layout: Layout, config: "ModelConfig") -> None:
        self.findings = Findings()
        self.tensor_findings = Findings()
        self.notes: list[str] = []
        self.tensors: dict[str, TensorInfo] = {}
        self.stamps: dict[Path, FileStamp] = {}
        self.skipped: Counter[str] = Counter()
        self._layout = layout
        self._config = config
        self._missing: list[str] = []  # shards that are not there
        self.damaged: set[str] = set()  # shards without a usable header
        self._rejected: set[str] = set()  # tensors whose entry in a header is already a finding
        self._misplaced: list[tuple[str, TensorInfo]] = []
        self._present_bytes = 0
        self._named: dict[str, list[str]] = {}  # what the index says is in a shard
        for name, shard in layout.weight_map.items():
            self._named.setdefault(shard, []).append(name)
        self.expected = self._expect(layout.weight_map)

    def _expect(self, stored_names: "dict[str, str] | dict[str, TensorInfo]") -> _Expected:
        return _Expected(self._config, any(name.endswith(".weight_packed") for name in stored_names))

    def read_shards(self) -> None:
        for shard, path in self._layout.shards.items():
            header = self._header(shard, path)
            if header is None:
                continue
            self.stamps[path] = header.stamp
            if self._layout.index_path is None:
                self.expected = self._expect(header.tensors)
            if not self._take_all(shard, header.tensors):
                for stored, info in header.tensors.items():
                    self._place(shard, stored, info)
        self._report_missing_shards()
        self._report_misplaced()
        if not (self._layout.index_path is None and self.damaged):
            self._report_missing_tensors()

    def _header(self, shard: str, path: Path) -> Header | None:
        try:
            check_link(path.parent, path)
            header = read_header(path, self.findings, names.PREFIX)
        except FileMissingError:
            self._missing.append(shard)
            return None
        except ModelFilesError as error:
            self.findings.add(str(error))
            self.damaged.add(shard)
            return None
        self._rejected |= {names.strip_prefix(name) for name in header.rejected}
        return header

    def _take_all(self, shard: str, stored: dict[str, TensorInfo]) -> bool:
        """File the tensors of a shard at once if there is nothing to say of any: five times as fast."""
        said = self._named.get(shard, ())
        if len(said) != len(stored) or not all(map(stored.__contains__, said)):
            return False
        taken = {info.name: info for info in stored.values()}
        if len(taken) < len(stored) or not self.tensors.keys().isdisjoint(taken):
            return False
        for name, info in taken.items():
            spec = self.expected.find(name)
            if spec is None or info.shape != spec.shape or info.dtype not in spec.dtypes:
                return False
        self.tensors |= taken
        self._present_bytes += sum(info.nbytes for info in taken.values())
        return True

    def _place(self, shard: str, stored: str, info: TensorInfo) -> None:
        """File one tensor, whose name in the file is `stored`, or say what is wrong with it."""
        name = info.name
        said = self._layout.weight_map.get(stored)
        earlier = self.tensors.get(name)
        if earlier is not None:
            self._tell(info, stored, f"is also in {earlier.path.name}")
            return
        if said is not None:
            self._present_bytes += info.nbytes
        spec = self.expected.find(name)
        if spec is None:
            why = names.skip_reason(name, self._config.num_hidden_layers)
            if why:
                self.skipped[why] += 1
            else:
                self._tell(info, stored, "is surplus: the configuration calls for no such tensor")
            return
        if self._layout.index_path is not None:
            if said is None:
                self._tell(info, stored, "is not in the index")
                self._rejected.add(name)
                return
            if said != shard:
                self._misplaced.append((stored, info))
                return
        if info.shape != spec.shape and info.shape != spec.short:
            self._tell(info, stored, f"has shape {list(info.shape)}, expected {list(spec.shape)}")
        if info.dtype not in spec.dtypes:
            self._tell(info, stored, f"has dtype {info.dtype}, expected {' or '.join(spec.dtypes)}")
        self.tensors[name] = info

    def _tell(self, info: TensorInfo, stored: str, what: str) -> None:
        self.tensor_findings.add(f"{info.path}: tensor {shown(stored)} {what}")

    def _report_missing_shards(self) -> None:
        """One finding each, with its bytes: exact where the index's total tells, else from the shapes."""
        if not self._missing:
            return
        sizes = dict.fromkeys(self._missing, 0)
        needed = dict.fromkeys(self._missing, False)
        for stored, shard in self._layout.weight_map.items():
            if shard in sizes:
                name = names.strip_prefix(stored)
                spec = self.expected.find(name)
                sizes[shard] += spec.nbytes if spec else 0
                needed[shard] |= names.skip_reason(name, self._config.num_hidden_layers) is None
        total = self._layout.total_size
        left = 0 if total is None or self.damaged else total - self._present_bytes
        if left > 0 and len(sizes) == 1:
            sizes = dict.fromkeys(sizes, left)
        about = "" if left == sum(sizes.values()) else "about "
        renamed = self._renamed()
        for shard, size in sizes.items():
            path = self._layout.shards[shard]
            if needed[shard]:
                self.findings.add(f"{path}: shard missing, {about}{size} bytes{renamed.get(shard, '')}")
            else:
                self.notes.append(f"{shard} is absent; the text model needs nothing of it")

    def _renamed(self) -> dict[str, str]:
        """For each missing shard whose tensors are in a file that the index does not name, a hint at that file."""
        folder = next(iter(self._layout.shards.values())).parent
        found: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name in self._layout.shards:
                continue
            try:
                check_link(folder, path)
                stored = read_header(path, Findings()).tensors
            except ModelFilesError:
                continue  # nobody asked for it
            for shard in self._missing:
                if stored.keys() >= set(self._named[shard]):
                    found.setdefault(shard, f" (its tensors are in {shown(path.name)}: {RENAME})")
        return found

    def _report_misplaced(self) -> None:
        for stored, info in self._misplaced:
            there = self.tensors.get(info.name)
            if there is not None:
                self._tell(info, stored, f"is also in {there.path.name}")
            else:
                self._tell(info, stored, f"is here, but the index says {self._layout.weight_map[stored]}")
                self._rejected.add(info.name)

    def _report_missing_tensors(self) -> None:
        """Tensors in no file; those of shards that could not be read are not told again."""
        if len(self.tensors) == self.expected.count:
            return
        unread = self.damaged.union(self._missing)
        excused = self._rejected.union(self.tensors)
        excused |= {
            names.strip_prefix(name) for name, shard in self._layout.weight_map.items() if shard in unread
        }
        missing = self.expected.count - sum(self.expected.find(name) is not None for name in excused)
        for spec in names.tensor_specs(self._config, self.expected.mxfp4):
            if missing == 0 or len(self.tensor_findings.lines) == LINES_MAX:
                break
            if spec.name not in excused:
                missing -= 1
                self.tensor_findings.add(self._missing_line(spec))
        self.tensor_findings.count += missing

    def _missing_line(self, spec: names.TensorSpec) -> str:
        weight_map = self._layout.weight_map
        shard = weight_map.get(names.PREFIX + spec.name) or weight_map.get(spec.name)
        if shard is not None:
            where, named = self._layout.shards[shard], " (the index names it here)"
        else:
            where, named = self._layout.index_path or next(iter(self._layout.shards.values())), ""
        kind = f"{spec.dtypes[0]} {list(spec.shape)}"
        return f"{where}: tensor '{spec.name}' is missing, {kind}, {spec.nbytes} bytes{named}"
