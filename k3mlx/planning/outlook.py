"""All that `k3mlx plan` tells of one model: sizes, this machine, common Macs, and what the estimates are based on."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

from k3mlx.devices import choose
from k3mlx.needs import Needs

from . import hits, host, ledger, machines, speed
from .machines import MACS, Mac
from .plan import METAL, PROCESS, TENSOR, Case, Sizes, best, case, mac_budget, model_needs, sizes
from .source import Source, describe

ASSUMED_RATE = 5e9  # bytes a second, where no disk rate is given
PUBLISHED = (
    "exact engines on this model: 0.29 tokens/s on an M1 Max with 64 GB at about 5 GB/s,"
    " 0.28 to 0.54 on an M5 Max with 128 GB at 13.6 GB/s"
)


@dataclass(frozen=True)
class Place:
    """One machine with each format of the dense weights. measured: the rate was given, not assumed."""

    name: str
    rate: float
    measured: bool
    basis: str
    cases: tuple[Case, ...]

    @property
    def best(self) -> Case:
        return best(self.cases)

    def report(self) -> dict[str, Any]:
        fields = {"machine": self.name, "disk_bytes_per_second": self.rate, "disk_rate_given": self.measured}
        return {**fields, "best": self.best.format, "formats": [case.report() for case in self.cases]}


@dataclass(frozen=True)
class Outlook:
    """`totals` are sums of stored bytes by name; `resident` bytes by format and part; `state` is set aside."""

    source: Source
    context: int
    stored: list[ledger.Row]
    totals: dict[str, int]
    resident: dict[str, dict[str, int]]
    sizes: dict[str, Sizes]
    session: dict[str, int]
    state: int
    here: Place
    macs: tuple[Place, ...]
    basis: dict[str, str]

    @property
    def fits(self) -> bool:
        """Whether it fits on this machine in some format."""
        return self.here.best.plan is not None

    def report(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "model": self.source.name,
            "origin": self.source.origin,
            "context": self.context,
            "stored_bytes": [row._asdict() for row in self.stored],
            "total_bytes": self.totals,
            "resident_bytes": self.resident,
            "memory_bytes": {name: asdict(found) for name, found in self.sizes.items()},
            "session_bytes": self.session,
            "state_set_aside_bytes": self.state,
            "fits": self.fits,
            "this_machine": self.here.report(),
            "macs": [place.report() for place in self.macs],
            "basis": self.basis,
        }


def look(model: str | None, context: int, memory: int | None, rate: float | None) -> Outlook:
    """Plan for a model. memory: bytes of the process here, None for what there is; rate: of the disk, if known.

    Raises ModelFilesError as `source.describe`, UsageError for a K3_METAL that means nothing.
    """
    source = describe(model)
    config = source.config
    needs = {name: model_needs(METAL, found, context) for name, found in source.formats.items()}
    stored = ledger.stored(config)
    return Outlook(
        source=source,
        context=context,
        stored=stored,
        totals=_totals(source, stored),
        resident={name: ledger.resident(found) for name, found in source.formats.items()},
        sizes={name: sizes(found) for name, found in needs.items()},
        session=ledger.session(config, context),
        state=next(iter(needs.values())).state,
        here=_here(source, context, memory, rate),
        macs=tuple(_mac(source, needs, mac, rate is not None) for mac in macs_for(memory, rate)),
        basis={
            "found in memory": hits.BASIS,
            "Macs": f"{machines.BASIS}; {speed.MAC.basis}; the disk gives {speed.DISK_SHARE[0]:.0%} to 100% of its"
            " rate (chosen so that the ranges hold what is published); a range wider than"
            f" {speed.WIDEST} is cut at its slow end: first tokens may take longer",
            "process": f"{PROCESS / 1e6:.0f} MB and {TENSOR} bytes for each tensor",
            "published": PUBLISHED,
        },
    )


def _totals(source: Source, stored: list[ledger.Row]) -> dict[str, int]:
    text = sum(row.total for row in stored)
    experts = sum(row.total for row in stored if row.group == ledger.EXPERTS)
    totals = {"dense text weights": text - experts, "text": text}
    if source.total is not None and source.total > text:
        totals |= {"other tensors of the index (vision)": source.total - text, "index": source.total}
    elif source.vision is not None:
        totals |= {"vision and projector, not used": source.vision, "release": text + source.vision}
    return totals


def _here(source: Source, context: int, memory: int | None, rate: float | None) -> Place:
    choice = choose()
    needs = {name: model_needs(choice, found, context) for name, found in source.formats.items()}
    weights = min(found.dense.total for found in needs.values())
    found = speed.MAC if choice.device == "metal" else host.measure(source.config, weights)
    cases = tuple(
        case(name, checkpoint, needs[name], memory, rate or ASSUMED_RATE, found)
        for name, checkpoint in source.formats.items()
    )
    name = f"{platform.system()} {platform.machine()}, {choice.backend} on {choice.device}"
    return Place(name, rate or ASSUMED_RATE, rate is not None, found.basis, cases)


def macs_for(memory: int | None, rate: float | None) -> tuple[Mac, ...]:
    """Common Macs, before them the one that memory and rate describe, if both are given."""
    if memory is None or rate is None:
        return MACS
    return (Mac("as asked", memory, rate, exactly=True), *MACS)


def _mac(source: Source, needs: dict[str, Needs], mac: Mac, given: bool) -> Place:
    cases = tuple(
        case(name, checkpoint, needs[name], mac_budget(mac), mac.disk_rate)
        for name, checkpoint in source.formats.items()
    )
    return Place(mac.name, mac.disk_rate, given and mac.exactly, speed.MAC.basis, cases)
