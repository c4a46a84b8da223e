"""Sessions kept for later, so that a prompt that begins like an earlier one is read from there on only.

Owns prompts as ids, where reading one pauses to keep a snapshot, and the kept snapshots: a byte budget in
memory, one on disk behind it, longest common beginning by ids. A state of Kimi K3 cannot be cut back, so
only points that were kept can be continued. Decides nothing about text.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import machine
from .errors import K3Error
from .memory import parse_size

if TYPE_CHECKING:
    from .engine import Engine, Session, Snapshot

MEMORY_MAX = 4_000_000_000  # of kept sessions, unless asked otherwise
MEMORY_SHARE = 16  # and at most one part in so many of the memory
NEAR = 8  # ids; a shorter pass is not worth its snapshot


@dataclass(frozen=True)
class Prompt:
    """What is to be continued.

    start: where the output begins (`channels.start_mode`), None for plain text. borders: numbers of ids up
    to the end of each message, rising. shared: how many of those belong to the leading system messages.
    opener: how many of the last ids open the channel of the answer.
    """

    ids: tuple[int, ...]
    start: str | None = None
    borders: tuple[int, ...] = ()
    shared: int = 0
    opener: int = 0

    def pauses(self, step: int, known: int = 0) -> list[int]:
        """The borders at which a snapshot is worth an extra pass, rising.

        After the leading system messages (other conversations begin alike), before and after the last
        message (it may be edited, or answered again), and others at least `step` ids apart. None within
        a few ids of the `known` ones that are read already.
        """
        wanted = {*self.borders[-2:], *self.borders[self.shared - 1 : self.shared]}
        chosen: list[int] = []
        for border in self.borders:
            if border < known + NEAR:
                continue
            if border in wanted or border - (chosen[-1] if chosen else known) >= step:
                chosen.append(border)
        return chosen


def session_memory(asked: int | str, memory: int | str = "auto") -> int:
    """Bytes for kept sessions: as asked for, or for `auto` a small part of `memory` (`auto`: of what is free)."""
    if asked != "auto":
        return parse_size(asked, "session_memory")
    if memory != "auto":
        return min(MEMORY_MAX, parse_size(memory, "memory") // MEMORY_SHARE)
    room = machine.available_memory()
    return MEMORY_MAX if room is None else min(MEMORY_MAX, room.free // MEMORY_SHARE)


@dataclass
class _Entry:
    """A kept point of a timeline: in memory, or in a file of a saved session."""

    snapshot: Snapshot | None
    path: Path | None = None
    file_bytes: int = 0


class KeptSessions:
    """Snapshots of one engine's sessions, the least recently used given up first.

    memory_bytes: how much state may stay in memory; what exceeds it moves to files of a private temporary
    folder, up to disk_bytes (0: is dropped). Used by the thread that runs the engine.
    """

    def __init__(self, engine: Engine, memory_bytes: int, disk_bytes: int = 0) -> None:
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self.hits = 0
        self._engine = engine
        self._entries: OrderedDict[tuple[int, ...], _Entry] = OrderedDict()
        self._folder: Path | None = None
        self._files = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used(self) -> tuple[int, int]:
        """Bytes in memory and bytes on disk. What snapshots share counts once."""
        memory: dict[int, int] = {}
        for entry in self._entries.values():
            if entry.snapshot is not None:
                memory |= entry.snapshot.state.memory()
        return sum(memory.values()), sum(entry.file_bytes for entry in self._entries.values())

    def resume(self, ids: Sequence[int]) -> Session:
        """A session that has read the longest kept beginning of `ids`, at least one id short of all."""
        ids = tuple(ids)
        for known in sorted(self._entries, key=len, reverse=True):
            if len(known) < len(ids) and ids[: len(known)] == known:
                session = self._session(known)
                if session is not None:
                    self.hits += 1
                    return session
        return self._engine.session()

    def keep(self, session: Session) -> None:
        """Remember the present point of a session."""
        if len(session) == 0:
            return
        snapshot = session.snapshot()
        entry = self._entries.pop(snapshot.ids, None)
        if entry is None or entry.snapshot is None:
            self._forget_file(entry)
            entry = _Entry(snapshot)
        self._entries[snapshot.ids] = entry
        self._make_room()

    def close(self) -> None:
        """Forget everything and remove the files."""
        self._entries.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _session(self, ids: tuple[int, ...]) -> Session | None:
        entry = self._entries[ids]
        self._entries.move_to_end(ids)
        if entry.snapshot is not None:
            session = self._engine.session()
            session.restore(entry.snapshot)
            return session
        assert entry.path is not None, "an entry is in memory or on disk"
        try:
            return self._engine.load_session(entry.path)
        except (K3Error, OSError):  # the file was removed or damaged behind our back
            self._forget_file(self._entries.pop(ids))
            return None

    def _make_room(self) -> None:
        for ids, entry in list(self._entries.items()):
            if self.used[0] <= self.memory_bytes:
                break
            if entry.snapshot is not None and not (self.disk_bytes and self._write(entry)):
                del self._entries[ids]
        for ids, entry in list(self._entries.items()):
            if self.used[1] <= self.disk_bytes:
                break
            if entry.path is not None:
                self._forget_file(self._entries.pop(ids))

    def _write(self, entry: _Entry) -> bool:
        """Move a snapshot from memory to a file; says whether that worked."""
        assert entry.snapshot is not None, "only what is in memory can be written"
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="k3mlx-sessions-"))
            path = self._folder / f"{self._files}.safetensors"
            self._files += 1
            session = self._engine.session()
            session.restore(entry.snapshot)
            session.save(path)
            entry.file_bytes, entry.path, entry.snapshot = path.stat().st_size, path, None
        except (K3Error, OSError):  # a full disk costs the snapshot, never the answer
            return False
        return True

    @staticmethod
    def _forget_file(entry: _Entry | None) -> None:
        if entry is not None and entry.path is not None:
            entry.path.unlink(missing_ok=True)
