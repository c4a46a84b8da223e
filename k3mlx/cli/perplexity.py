"""`k3mlx perplexity FILE`: how well the model predicts a text."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .options import add_model_options, check_target, open_engine, write_text
from .progress import QUIET_SECONDS, StatusLine, duration

if TYPE_CHECKING:
    from k3mlx.perplexity import Sums

HELP = "how well the model predicts a text: nats a token, bits a byte"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a text in UTF-8; - is standard input")
    parser.add_argument("--window", type=int, metavar="N", help="tokens read at once (default: 2048)")
    parser.add_argument(
        "--stride", type=int, metavar="N", help="tokens between two windows (default: the window: no overlap)"
    )
    parser.add_argument(
        "--resume", metavar="STATE", help="keep the sums in this file, and go on from it if it is there"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures as one object; - is stdout")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    from k3mlx.perplexity import perplexity

    check_target(args.json, "--json")
    check_target(args.resume, "--resume")
    text = _read(args.file)
    with open_engine(args) as engine:
        ids = engine.tokenizer.encode(text)
        progress = _Progress()
        engine.on_layer = progress.layer
        sums = perplexity(engine, ids, args.window, args.stride, args.resume, progress.window)
        progress.close()
        found = {"file": args.file, "tokens": len(ids), **sums.figures(), "report": engine.report()}
    print(_line(sums), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        write_text(args.json, json.dumps(found) + "\n", "--json")
    return 0


def _read(file: str) -> str:
    """The text of a file or of standard input. Raises UsageError if there is none or it is not UTF-8."""
    from k3mlx.errors import UsageError

    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not UTF-8: byte 0x{data[error.start]:02X} at offset {error.start}; convert it first"
        ) from None


def _line(sums: Sums) -> str:
    figures = sums.figures()
    density = "" if sums.bits_per_byte is None else f", {sums.bits_per_byte:.4f} bits per byte"
    rate = figures["tokens_per_second"]
    speed = "" if rate is None else f" | {sums.fed} tokens read in {sums.seconds:.1f} s ({rate:.3g}/s)"
    return (
        f"{sums.nats_per_token:.5f} nats per token (perplexity {figures['perplexity']:.4g}){density}"
        f" | {sums.tokens} tokens, {sums.bytes} bytes in {sums.windows} windows{speed}"
    )


class _Progress:
    """A line on stderr: windows, the figure so far, the time left."""

    def __init__(self) -> None:
        self._status = StatusLine()
        self._status.wait(QUIET_SECONDS)
        self._began = time.monotonic()
        self._before: int | None = None  # windows that an earlier run has done
        self._text = "window 1"

    def layer(self, done: int, total: int) -> None:
        if self._status.due():
            self._status.show(f"{self._text}: layer {done} of {total}")

    def window(self, done: int, total: int, sums: Sums) -> None:
        if self._before is None:
            self._before = done - 1
        each = (time.monotonic() - self._began) / (done - self._before)
        left = duration(each * (total - done))
        self._text = f"window {done} of {total} done, {sums.nats_per_token:.4f} nats per token, {left} left"
        if self._status.due():
            self._status.show(self._text)

    def close(self) -> None:
        self._status.erase()
