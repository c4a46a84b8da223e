"""`k3mlx download`: fetch a model, and show how far it has come. The work is `k3mlx.download`'s."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from k3mlx.checkpoint.resume import RELEASED
from k3mlx.memory import format_size

from .options import check_target, note, write_text
from .progress import QUIET_SECONDS, StatusLine, duration

if TYPE_CHECKING:
    from k3mlx.download import Meter, Result

HELP = "fetch a model from the hub: resumable, verified, over several drives"

WINDOW_SECONDS = 30.0  # over which the rate is taken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", nargs="?", metavar="MODEL", help=f"repository (default: {RELEASED}, 1.56 TB)")
    parser.add_argument(
        "--revision", help="branch, tag or commit (default: the commit of the last run here, else main)"
    )
    parser.add_argument(
        "--local-dir", type=_folder, metavar="DIR", help="destination (default: the Hugging Face cache)"
    )
    parser.add_argument(
        "--dirs",
        nargs="+",
        type=_folder,
        default=(),
        metavar="DIR",
        help="more folders that take shards, by free space; remembered. Run with --model-dirs DIR ... later",
    )
    parser.add_argument(
        "--vision", action="store_true", help="also the shards with nothing but the vision tower"
    )
    parser.add_argument(
        "--verify", action="store_true", help="hash what is here again, and fetch what is damaged"
    )
    parser.add_argument("--max-workers", type=int, default=8, metavar="N", help="files at once (default: 8)")
    parser.add_argument("--json", metavar="FILE|-", help="write what was done as one object; - is stdout")


def run(args: argparse.Namespace) -> int:
    from k3mlx.download import Request, download

    check_target(args.json, "--json")
    request = Request(
        repo=args.repo,
        revision=args.revision,
        local_dir=args.local_dir,
        dirs=args.dirs,
        vision=args.vision,
        verify=args.verify,
        max_workers=args.max_workers,
    )
    progress = DownloadProgress()
    try:
        result = download(request, progress)
    except KeyboardInterrupt:
        progress.close()
        note("what came is kept; the same command goes on from there")
        raise
    finally:
        progress.close()
    _tell(result, args.json)
    return 0


def _folder(text: str) -> Path:
    return Path(text).expanduser()


def _tell(result: Result, json_target: str | None) -> None:
    note(
        f"{result.repo} at {result.commit[:12]}: complete, {result.files} files, {format_size(result.size)};"
        f" {format_size(result.received)} received in {duration(result.seconds)}"
    )
    if result.dirs:
        note(f"run it with: --model-dirs {' '.join(shlex.quote(str(folder)) for folder in result.dirs)}")
    if json_target is not None:
        write_text(json_target, json.dumps(_as_object(result), indent=2) + "\n", "--json")
    if json_target != "-":
        print(result.folder)


def _as_object(result: Result) -> dict[str, object]:
    return {
        "model": result.repo,
        "commit": result.commit,
        "folder": str(result.folder),
        "dirs": [str(folder) for folder in result.dirs],
        "files": result.files,
        "bytes": result.size,
        "bytes_received": result.received,
        "skipped": result.skipped,
        "seconds": round(result.seconds, 3),
    }


class DownloadProgress:
    """Called with the meter of a download, often: tells its notes at once, and now and then how far it is."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = StatusLine(out, clock)
        self._received, self._hashed = Rate(clock), Rate(clock)

    def __call__(self, meter: Meter) -> None:
        for text in meter.take_notes():
            self._line.note(text)
        received, hashed = self._received.of(meter.received), self._hashed.of(meter.hashed)
        if received is not None and meter.done < meter.total:
            self._show("", meter.done, meter.total, received)
        elif hashed is not None and meter.hashed < meter.to_hash:
            self._show("hashing: ", meter.hashed, meter.to_hash, hashed)

    def close(self) -> None:
        self._line.erase()

    def _show(self, what: str, done: int, total: int, rate: float) -> None:
        if self._line.due():
            left = duration((total - done) / rate) + " left" if rate else "waiting"
            sizes = f"{format_size(done)} of {format_size(total)}, {done / total:.1%}"
            self._line.show(f"{what}{sizes}, {format_size(round(rate))}/s, {left}")


class Rate:
    """Bytes a second over the last half minute, of a count that only grows."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # (seconds, bytes), the first when there was one

    def of(self, count: int) -> float | None:
        """The rate with `count` bytes now; None in the first seconds, when it would say nothing."""
        if count == 0:
            return None
        now = self._clock()
        self._samples.append((now, count))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()
        since, had = self._samples[0]
        return (count - had) / (now - since) if now - since >= QUIET_SECONDS else None
