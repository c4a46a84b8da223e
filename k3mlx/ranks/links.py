"""Control between rank 0 and the others: small messages, and a heartbeat that notices who has gone.

Owns one socket for each other rank. Tensors do not go this way: they are the collectives' business
(`exchange.py`), which may block for ever when a peer is lost. So a loss found here ends the process.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from k3mlx.errors import K3Error

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 15.0  # without a beat: the other process hangs, is stopped, or its machine is
CONNECT_SECONDS = 20.0
MESSAGE_MAX = 1 << 20  # bytes
_LENGTH = struct.Struct("!I")
Message = dict[str, Any]
OnLost = Callable[[int, str], None]  # rank, why; ends the process unless it is a test


class Link:
    """The control connection to one rank. `on_lost` is called once, in a thread of the link, if it breaks."""

    def __init__(self, peer: int, connection: socket.socket, on_lost: OnLost) -> None:
        self.peer = peer
        self._socket = connection
        self._on_lost = on_lost
        self._messages: queue.Queue[Message] = queue.Queue()
        self._sending = threading.Lock()
        self._heard = time.monotonic()
        self._closed = threading.Event()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for work in (self._read, self._beat):
            threading.Thread(target=work, name=f"k3mlx-link-{peer}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Hand a message over; what goes wrong with the connection is `on_lost`'s business."""
        with contextlib.suppress(OSError), self._sending:
            send_message(self._socket, message)

    def receive(self, seconds: float | None = None) -> Message:
        """The next message that is no beat. Raises K3Error after `seconds` without one, or for an `error` message."""
        try:
            message = self._messages.get(timeout=seconds)
        except queue.Empty:
            raise K3Error(f"rank {self.peer} has not answered within {seconds:g} s") from None
        if "error" in message:
            raise K3Error(f"rank {self.peer}: {message['error']}")
        return message

    def close(self) -> None:
        """The other side is not to be missed any more."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        try:
            while True:
                message = receive_message(self._socket)
                self._heard = time.monotonic()
                if message.get("op") == "bye":
                    self._closed.set()
                if message.get("op") != "beat":
                    self._messages.put(message)
        except (OSError, ValueError) as error:
            self._lose(f"its connection is closed ({str(error) or type(error).__name__})")

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self.send({"op": "beat"})
            silent = time.monotonic() - self._heard
            if silent > SILENCE_SECONDS:
                self._lose(f"nothing heard of it for {silent:.0f} s")

    def _lose(self, why: str) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        # an error that it has sent before it went says more than that it has gone
        with contextlib.suppress(queue.Empty):
            while True:
                why = str(self._messages.get_nowait().get("error", why))
        self._on_lost(self.peer, why)


class Door:
    """Where rank 0 waits for the others: an address, and a word that only ranks of this run know."""

    def __init__(self, address: str) -> None:
        self.word = secrets.token_hex(16)
        self._socket = socket.create_server((address, 0))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def admit(self, ranks: Sequence[int], on_lost: OnLost) -> list[Link]:
        """Links to `ranks`, in their order. Raises K3Error when one does not come in time."""
        found: dict[int, Link] = {}
        until = time.monotonic() + CONNECT_SECONDS
        try:
            while missing := [rank for rank in ranks if rank not in found]:
                self._socket.settimeout(max(0.01, until - time.monotonic()))
                try:
                    connection, _ = self._socket.accept()
                    connection.settimeout(max(0.01, until - time.monotonic()))
                    hello = receive_message(connection)
                except TimeoutError:
                    raise K3Error(f"rank {missing[0]} did not come within {CONNECT_SECONDS:g} s") from None
                except (OSError, ValueError):
                    continue
                if hmac.compare_digest(str(hello.get("word")), self.word) and hello.get("rank") in missing:
                    found[hello["rank"]] = Link(hello["rank"], connection, on_lost)
                else:
                    connection.close()
        finally:
            self._socket.close()
        return [found[rank] for rank in ranks]


def enter(address: tuple[str, int], word: str, rank: int, on_lost: OnLost) -> Link:
    """The link of rank `rank` to rank 0's door. Raises K3Error when it cannot be reached."""
    try:
        connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
    except OSError as error:
        raise K3Error(f"rank 0 cannot be reached at {address[0]} port {address[1]}: {error}") from None
    send_message(connection, {"rank": rank, "word": word})
    return Link(0, connection, on_lost)


def send_message(connection: socket.socket, message: Message) -> None:
    text = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive_message(connection: socket.socket) -> Message:
    """Raises OSError when the connection ends, ValueError for what is no message."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > MESSAGE_MAX:
        raise ValueError(f"a message of {length} bytes, expected at most {MESSAGE_MAX}")
    message = json.loads(_receive(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("closed by the other side")
        data += piece
    return bytes(data)
