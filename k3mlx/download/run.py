"""A download from beginning to end: what is agreed on, what is missing, the threads that fetch it.

Prints nothing: `watch` is called in the calling thread, several times a second, with what there is to tell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock

from k3mlx.checkpoint.findings import Findings
from k3mlx.checkpoint.layout import INDEX_NAME
from k3mlx.checkpoint.resume import RELEASED
from k3mlx.errors import K3Error, ModelFilesError
from k3mlx.memory import format_size

from .attempts import Attempts, Meter
from .fetch import Job
from .places import STATE, CachedRepository, Place
from .pool import settle_all
from .record import Record
from .remote import Hub, Listing, RemoteFile, Trouble
from .request import Request, agree, check_same_model, find_record, places_of
from .survey import Entry, choose, survey

Watch = Callable[[Meter], None]


class Result(NamedTuple):
    """What is on disk now.

    folder: what `--model` takes; dirs: what `--model-dirs` takes; size: bytes of `files` files; received: bytes
    from the network in this run; skipped: why a file was not wanted, by name.
    """

    repo: str
    commit: str
    folder: Path
    dirs: tuple[Path, ...]
    files: int
    size: int
    received: int
    skipped: dict[str, str]
    seconds: float


def download(request: Request, watch: Watch = lambda meter: None) -> Result:
    """Make a repository complete on disk, going on from whatever is there.

    Raises UsageError for names and folders that cannot be used, ResourceError when it does not fit,
    ModelFilesError offline for what is missing or damaged, K3Error for what the hub or the disk refuse.
    KeyboardInterrupt ends the threads; what came is kept.
    """
    started = monotonic()
    request.check()
    root, old = find_record(request)
    offline = constants.HF_HUB_OFFLINE if request.offline is None else request.offline
    repo = request.repo or (old.repo if old else RELEASED)
    hub = None if offline else Hub(repo, request.endpoint, request.patience.timeout)
    work = _Work(request, hub, repo, watch)
    record = agree(request, old, work.listing, repo)
    places = places_of(request, record, root)
    if old is None:
        check_same_model(places[0], record)
    for place in places:
        place.prepare()
    with _locked(places):
        record.save(root)
        wanted, skipped = work.settle(places, record, root)
        record.complete = True
        record.save(root)
        if isinstance(places[0], CachedRepository):
            places[0].name_revision(record.revision, record.commit)
    size = sum(file.size for file in wanted)
    dirs = tuple(place.root for place in places[1:])
    received, seconds = work.meter.received, monotonic() - started
    return Result(repo, record.commit, places[0].folder, dirs, len(wanted), size, received, skipped, seconds)


class _Work:
    """The hub, the threads and the meter of one download. hub is None offline."""

    def __init__(self, request: Request, hub: Hub | None, repo: str, watch: Watch) -> None:
        self.meter = Meter()
        self._request = request
        self._hub = hub
        self._repo = repo
        self._watch = watch
        self._stop = threading.Event()

    def listing(self, revision: str) -> Listing:
        """What the hub says of a revision now, with patience."""
        if self._hub is None:
            raise ModelFilesError(
                f"{self._repo}: offline (HF_HUB_OFFLINE), and no record says which files it has;"
                " run once with the network"
            )
        attempts = Attempts(self._request.patience, self._stop, self._say)
        while True:
            try:
                return self._hub.listing(revision)
            except Trouble as trouble:
                attempts.failed(trouble)

    def settle(
        self, places: Sequence[Place], record: Record, root: Path
    ) -> tuple[list[RemoteFile], dict[str, str]]:
        """Fetch the index, then what it calls for. Returns the files wanted, and why others are not."""
        everything = list(record.files.values())
        index = [file for file in everything if file.name == INDEX_NAME]
        self._settle(survey(index, places), record, root)
        wanted, skipped = choose(everything, places[0].folder, record.vision)
        entries = survey(wanted, places, self._request.verify)
        self._say(_ahead(entries, skipped, record))
        self._settle(entries, record, root)
        return wanted, skipped

    def _settle(self, entries: list[Entry], record: Record, root: Path) -> None:
        if self._hub is None:
            _refuse_missing(entries)
        self.meter.total = sum(entry.file.size for entry in entries)
        self.meter.done = sum(entry.here for entry in entries)
        self.meter.to_hash, self.meter.hashed = sum(entry.to_hash for entry in entries), 0
        job = Job(
            self._hub, record.commit, self._request.patience, self.meter, self._stop,
            lambda file: record.verify(file, root),
        )  # fmt: skip
        settle_all(job, entries, self._request.max_workers, lambda: self._watch(self.meter))

    def _say(self, text: str) -> None:
        self.meter.note(text)
        self._watch(self.meter)


def _ahead(entries: Sequence[Entry], skipped: dict[str, str], record: Record) -> str:
    """One line on what is to come."""
    total = sum(entry.file.size for entry in entries)
    missing = sum(entry.missing for entry in entries)
    hashed = sum(entry.to_hash for entry in entries)
    left_out = sum(record.files[name].size for name, why in skipped.items() if why == "vision only")
    text = f"{record.repo} at {record.commit[:12]}: {len(entries)} files, {format_size(total)}"
    text += f", {format_size(missing)} to fetch"
    text += f", {format_size(hashed)} here to hash" if hashed else ""
    return text + (f" (without {format_size(left_out)} for vision only)" if left_out else "")


def _refuse_missing(entries: Sequence[Entry]) -> None:
    findings = Findings()
    for entry in entries:
        if not entry.whole:
            path = entry.place.folder / entry.file.name
            findings.add(
                f"{path}: {entry.missing} of {entry.file.size} bytes are missing, and HF_HUB_OFFLINE is set"
            )
    findings.raise_if_any()


@contextmanager
def _locked(places: Sequence[Place]) -> Iterator[None]:
    """Keep a second download out of these folders."""
    with ExitStack() as stack:
        for place in places:
            try:
                stack.enter_context(WeakFileLock(place.root / STATE / "lock", timeout=0.1))
            except TimeoutError:
                raise K3Error(
                    f"{place.root}: another download is writing here; wait for it, or stop it first"
                ) from None
        yield
