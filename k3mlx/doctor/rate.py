"""How fast the disk gives the experts of a model: bytes that are on the disk and not in memory, each read once.

Where that cannot be made sure there is a reason in place of a number. Reads with the engine's own reader
(`experts.probe`). It cannot see what lies behind the operating system: the cache of a host or of a file server.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from k3mlx.checkpoint.safetensors import FileStamp
from k3mlx.errors import ModelFilesError
from k3mlx.experts.files import ExpertFiles, direct_supported
from k3mlx.experts.layout import ExpertLayout, Placement
from k3mlx.experts.probe import PROBE_MIN_BYTES, drop_cached, read_rate
from k3mlx.memory import format_size

from .disks import file_system
from .findings import Finding, fatal, ok
from .residency import cached_share, on_disk

FIRST = 8  # experts; more follow where these are read in no time
MORE = 32
QUICK = 0.5  # seconds
TRIED = 512  # places that are looked at before giving up

CACHED_MAX = 0.02  # the share of an expert that may be in memory
# what answers from a cache that this system does not see: of a file server, of a host, or its own
OPAQUE = ("nfs", "cifs", "smb", "fuse", "9p", "virtiofs", "ceph", "afs", "afp", "webdav", "lustre", "zfs")

Share = Callable[[Path, int, int], float | None]


@dataclass(frozen=True)
class Rate:
    """One measurement. direct: past the page cache."""

    direct: bool
    bytes_per_second: float
    nbytes: int
    threads: int


@dataclass(frozen=True)
class DiskRate:
    """Rates of both ways of reading where both work; or none and why. token_bytes: experts of a token, none cached."""

    rates: tuple[Rate, ...] = ()
    reason: str = ""
    error: str = ""
    token_bytes: int = 0


def measure(
    layout: ExpertLayout,
    stamps: Mapping[Path, FileStamp],
    threads: int,
    per_token: int,
    share: Share = cached_share,
    kind_of: Callable[[Path], str] = file_system,
    order: random.Random | None = None,
) -> DiskRate:
    """Read experts of a checkpoint at random places, past the page cache and through it.

    threads: reads at once. per_token: experts that a token uses in each layer.
    """
    if layout.count * layout.payload < PROBE_MIN_BYTES:
        return DiskRate(
            reason=f"all experts together are {format_size(layout.count * layout.payload)}, too little"
        )
    places = _Places(layout, share, order or random.Random())
    kind = kind_of(places.folder)
    if kind.startswith(OPAQUE):
        return DiskRate(
            reason=f"the file system ({kind}) may answer from a cache that cannot be seen from here"
        )
    try:
        found = _measure(layout, stamps, threads, places)
    except (ModelFilesError, OSError) as error:
        return DiskRate(error=str(error))
    return replace(found, token_bytes=per_token * len(layout.layers) * layout.payload)


def check_rate(found: DiskRate) -> Finding:
    """The rates, or why there is none."""
    if found.error:
        return fatal("read", found.error, "check the drive and its cable; then fetch that file again")
    if not found.rates:
        return ok("disk-rate", f"not measured: {found.reason}")
    text = " and ".join(
        f"{rate.bytes_per_second / 1e9:.2f} GB/s {'direct' if rate.direct else 'through the page cache'}"
        f" ({format_size(rate.nbytes)}, {rate.threads} reads at once)"
        for rate in found.rates
    )
    best = max(rate.bytes_per_second for rate in found.rates)
    need = f"a token with no expert in memory reads {format_size(found.token_bytes)}"
    return ok(
        "disk-rate", f"{text}; {need}: {found.token_bytes / best:.3g} s",
        data={"rates": [asdict(rate) for rate in found.rates], "token_bytes": found.token_bytes},
    )  # fmt: skip


class _Places:
    """Experts in random order whose bytes are on the disk and not in memory. None is given twice."""

    def __init__(self, layout: ExpertLayout, share: Share, order: random.Random) -> None:
        keys = [(layer, expert) for layer in layout.layers for expert in range(layout.experts)]
        self._keys = iter(order.sample(keys, min(TRIED, len(keys))))
        self._layout = layout
        self._share = share
        self._refused = {"sparse": 0, "cached": 0, "unknown": 0}
        self.folder = layout.place(*keys[0]).pieces[0].path.parent

    def take(self, count: int) -> list[Placement]:
        """At most so many more."""
        found: list[Placement] = []
        for key in self._keys:
            placement = self._layout.place(*key)
            if self._usable(placement):
                found.append(placement)
                if len(found) == count:
                    break
        return found

    def reason(self) -> str:
        """Why there are not enough."""
        reasons = {
            "sparse": "the files are sparse, at the places tried there are no bytes on the disk",
            "cached": "the experts are in memory and the file system does not let them go",
            "unknown": "the system does not tell this user which bytes are in memory; try as the files' owner",
        }
        return reasons[max(self._refused, key=self._refused.__getitem__)]

    def _usable(self, placement: Placement) -> bool:
        if not all(on_disk(*piece[:3]) for piece in placement.pieces):
            self._refused["sparse"] += 1
            return False
        drop_cached([placement])
        shares = [self._share(*piece[:3]) for piece in placement.pieces]
        if None in shares:
            self._refused["unknown"] += 1
            return False
        if max(share or 0.0 for share in shares) > CACHED_MAX:
            self._refused["cached"] += 1
            return False
        return True


def _measure(
    layout: ExpertLayout, stamps: Mapping[Path, FileStamp], threads: int, places: _Places
) -> DiskRate:
    files = ExpertFiles(stamps)
    rates = []
    try:
        for direct in (True, False) if direct_supported() else (False,):
            files.direct = direct
            rate = _rate(files, layout.slot_bytes, threads, places)
            if rate is None:
                break
            rates.append(rate)
            if direct and not rate.direct:
                break  # a file system without direct reads
    finally:
        files.close()
    if not rates:
        return DiskRate(reason=places.reason())
    return DiskRate(tuple(rates))


def _rate(files: ExpertFiles, slot_bytes: int, threads: int, places: _Places) -> Rate | None:
    """The rate of a few experts, of more where these took no time; None if there are too few to be read.

    Direct reads that fail are done again through the page cache, which tells a refusal from a damaged disk.
    """
    batch = places.take(FIRST)
    if len(batch) < FIRST:
        return None
    try:
        rate, seconds = read_rate(files, batch, slot_bytes, threads)
    except ModelFilesError:
        if not files.direct:
            raise
        files.direct = False
        rate, seconds = read_rate(files, batch, slot_bytes, threads)
    more = places.take(MORE) if seconds < QUICK else []
    if len(more) >= FIRST:
        batch = more
        rate, seconds = read_rate(files, batch, slot_bytes, threads)
    return Rate(files.direct, rate, round(rate * seconds), threads)
