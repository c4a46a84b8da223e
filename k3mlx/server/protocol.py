"""uvicorn's HTTP protocol with a deadline for the head of a request, against clients that dribble.

Owns that deadline only; the deadline of a body is the application's.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0


class DeadlineProtocol(H11Protocol):
    """Closes a connection whose request line and headers are not complete in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and not self._answering():
            self._await_head()  # the next request of a connection begins
        super().data_received(data)
        if self._answering():
            self._head_is_here()

    def on_response_complete(self) -> None:
        self._head_is_here()
        super().on_response_complete()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
