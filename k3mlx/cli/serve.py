"""`k3mlx serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .options import add_model_options, note, open_engine

if TYPE_CHECKING:
    from k3mlx.engine import Engine

HELP = "serve the model to OpenAI clients and to a web page, on this machine unless told otherwise"

LOADING_SECONDS = 10.0  # between two lines while weights load
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="default: 8080; 0 takes a free one")
    parser.add_argument(
        "--api-key", metavar="KEY", help="demand this key from clients (or the environment's K3_API_KEY)"
    )
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL", help="let web pages of this origin ask"
    )
    parser.add_argument(
        "--max-tokens", "-m", type=int, default=32_768, metavar="N",
        help="of an answer whose request names no limit (default: 32768)",
    )  # fmt: skip
    parser.add_argument(
        "--max-queue", type=int, default=64, metavar="N", help="waiting requests (default: 64)"
    )
    parser.add_argument(
        "--max-messages", type=int, default=4096, metavar="N", help="in one request (default: 4096)"
    )
    parser.add_argument("--max-body", default="16MB", metavar="SIZE", help="of one request (default: 16MB)")
    parser.add_argument(
        "--session-memory", default="auto", metavar="SIZE",
        help="state of earlier conversations, kept so that only what is new is read (default: a part of"
        " memory, at most 4GB)",
    )  # fmt: skip
    parser.add_argument(
        "--session-disk", default="16GB", metavar="SIZE",
        help="of it, kept in temporary files when memory is full; 0 is none (default: 16GB)",
    )  # fmt: skip
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    from k3mlx.errors import ResourceError, UsageError

    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ResourceError(f"serve needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from k3mlx.kept import session_memory
    from k3mlx.memory import parse_size
    from k3mlx.server.app import Settings
    from k3mlx.server.requests import Limits
    from k3mlx.server.run import listen, serve
    from k3mlx.server.worker import Worker

    for name in ("max_tokens", "max_queue", "max_messages"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    limits = Limits(parse_size(args.max_body, "max_body"), args.max_messages, args.max_queue, args.max_tokens)
    if args.api_key == "" or limits.body_bytes < 1:
        what = "--api-key is empty" if args.api_key == "" else f"--max-body is {args.max_body}"
        raise UsageError(f"{what}; expected something, or leave it out")
    key = args.api_key or os.environ.get("K3_API_KEY") or None
    local = args.host in LOOPBACK
    settings = Settings(
        served_name(args.model), limits, key, tuple(args.allow_origin), frozenset(LOOPBACK) if local else None
    )
    if not local and key is None:
        note(f"warning: {args.host} is open to others and there is no --api-key")
    kept = session_memory(args.session_memory, args.memory)
    bound = listen(args.host, args.port)
    shown = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{shown}:{bound.getsockname()[1]}"
    failure: list[BaseException] = []

    def load() -> Engine:
        note(f"{settings.model}: loading; {url}/health tells when it is ready")
        with _still_loading(settings.model):
            return open_engine(args, kept)

    worker = Worker(
        load,
        queue_limit=args.max_queue,
        keep_bytes=kept,
        keep_disk_bytes=parse_size(args.session_disk, "session_disk"),
        on_ready=lambda engine: note(f"{settings.model}: ready at {url} (API at {url}/v1), Ctrl-C ends"),
        on_failure=failure.append,
    )
    serve(worker, settings, bound)
    if failure:
        raise failure[0]
    return 0


@contextmanager
def _still_loading(model: str) -> Iterator[None]:
    """Say every now and then that loading goes on, and how far memory has grown."""
    from k3mlx.memory import format_size, peak_memory_bytes

    done, started = threading.Event(), time.monotonic()

    def say() -> None:
        while not done.wait(LOADING_SECONDS):
            seconds = time.monotonic() - started
            note(f"{model}: loading for {seconds:.0f} s, {format_size(peak_memory_bytes())} in memory")

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def served_name(model: str | None) -> str:
    """The name by which clients know the model: of the folder, or of the repository."""
    if model is None:
        return "k3-nano"
    return Path(model).resolve().name if Path(model).exists() else model
