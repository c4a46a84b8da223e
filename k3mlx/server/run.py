"""Running the server: sockets, signals, and an end within five seconds.

Owns the process side. The application is `app.py`, the engine's thread `worker.py`.
"""

from __future__ import annotations

import os
import socket
import sys
from types import FrameType

import uvicorn

from k3mlx.errors import UsageError

from .app import Settings, make_app
from .protocol import DeadlineProtocol
from .worker import Worker

FINISH_SECONDS = 3  # for the running answer after a signal
STOP_SECONDS = 1.5  # for the worker to stop between two layers


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises UsageError when the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        if sys.platform != "win32":  # there it would let two servers share a port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host} port {port} ({error}); choose another --port") from None
    return bound


def make_server(worker: Worker, settings: Settings) -> uvicorn.Server:
    """The server for a worker; `should_exit` ends it."""
    config = uvicorn.Config(
        make_app(worker, settings),
        http=DeadlineProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=FINISH_SECONDS,
    )
    return _Server(config, worker)


def serve(worker: Worker, settings: Settings, bound: socket.socket) -> None:
    """Load and serve until a signal comes, or until loading has failed."""
    worker.start()
    make_server(worker, settings).run(sockets=[bound])
    worker.stop()
    worker.join(STOP_SECONDS)
    if worker.is_alive():  # inside one layer: nothing is lost by leaving now
        print("k3mlx: the layer in work took too long, leaving", file=sys.stderr, flush=True)
        os._exit(0)


class _Server(uvicorn.Server):
    """uvicorn's server, which on a signal lets the running answer finish and then ends with code 0."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.drain()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._worker.state == "failed"
