"""The ranks of a run that have found each other, and how a run ends when one of them is lost.

Owns rendezvous, agreement on the model, and the end of the process. Every rank makes one of these before it opens
anything, so that whatever goes wrong later is heard by all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from k3mlx.errors import K3Error
from k3mlx.model.owner import OWNER
from k3mlx.watchdog import Watchdog, end_process, save_ids

from .exchange import Exchange, join
from .launch import own_address
from .links import Door, Link, Message, enter

JOIN_SECONDS = 25.0
ADDRESS_BYTES = 512
ANSWER_SECONDS = 120.0  # for a rank to open its model


class Team:
    """All ranks, seen from one. `links` are to the others on rank 0, to rank 0 on the others."""

    def __init__(self) -> None:
        """Meet the others. Ends the process when they do not come; raises K3Error when one cannot be reached."""
        self.fed: Callable[[], Sequence[int]] = tuple  # ids to save when a rank is lost
        self.open = True
        self.links: list[Link] = []

        def meet() -> tuple[Exchange, Door | None, Message]:
            with _ended_after(JOIN_SECONDS, "the other ranks of this launch did not all come"):
                exchange = join()
                door = Door(own_address()) if exchange.rank == 0 else None
                note = {} if door is None else {"address": door.address, "word": door.word}
                return (
                    exchange,
                    door,
                    json.loads(exchange.bytes_from_zero(json.dumps(note).encode(), ADDRESS_BYTES)),
                )

        self.exchange, door, found = OWNER.call(lambda call: meet(), Watchdog())
        self.rank, self.size = self.exchange.rank, self.exchange.size
        if door is not None:
            self.links = door.admit(range(1, self.size), self.lost)
        else:
            address, port = found["address"]
            self.links = [enter((address, port), found["word"], self.rank, self.lost)]

    def lost(self, rank: int, why: str) -> None:
        """A rank is gone: collectives may block for ever now, so this process ends."""
        fed = self.fed()
        kept = f" {len(fed)} ids fed so far are in {save_ids(fed)}" if fed else ""
        for link in self.links:
            link.send({"error": f"rank {rank} is lost: {why}"})
        end_process(f"k3mlx: error: rank {rank} is lost: {why}; the run ends.{kept}")

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank gives up."""
        self.open = False
        for link in self.links:
            link.send({"error": str(error) or type(error).__name__})
            link.close()

    def agree(self, facts: Mapping[str, str], settings: Message | None = None) -> Message:
        """Compare what every rank has opened with rank 0's; returns rank 0's `settings`, which the others go by.

        Raises K3Error, on every rank, when they differ.
        """
        if self.rank:
            self.links[0].send({"op": "facts", **facts})
            return self.links[0].receive(ANSWER_SECONDS)
        answers = [link.receive(ANSWER_SECONDS) for link in self.links]
        wrong = [
            f"rank {link.peer} has {name} {answer.get(name)}, rank 0 has {value}"
            for link, answer in zip(self.links, answers, strict=True)
            for name, value in facts.items()
            if answer.get(name) != value
        ]
        if wrong:
            raise K3Error(f"{wrong[0]}: give every rank the same model, options and version of k3mlx")
        self.tell({"op": "agreed", **(settings or {})})
        return settings or {}

    def tell(self, message: Message) -> None:
        """A message to every link."""
        for link in self.links:
            link.send(message)

    def close(self) -> None:
        self.open = False
        for link in self.links:
            link.send({"op": "bye"})
            link.close()

    def ask(self, message: Message) -> list[dict[str, Any]]:
        """Send a message to every link, and return their answers by rank."""
        self.tell(message)
        return [link.receive(ANSWER_SECONDS) for link in self.links]


@contextmanager
def _ended_after(seconds: float, why: str) -> Iterator[None]:
    """A deadline for what holds Python's own lock while it waits: another process kills this one."""
    line = f"k3mlx: error: {why} within {seconds:g} s"
    script = 'sleep "$1"; echo "$2" >&2; kill -9 "$3"'
    command = ["sh", "-c", script, "k3mlx", str(seconds), line, str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    ) as watcher:
        try:
            yield
        finally:
            os.killpg(watcher.pid, signal.SIGKILL)
