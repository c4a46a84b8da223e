"""Who may ask, and how much they may send. Owns the checks before a request is read, and the body's limits."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .failures import ApiError

BODY_SECONDS = 30.0  # to send a body
DISCARD_BYTES = 256_000_000  # of a body that is too large, so that its sender gets to read why


class Guard:
    """Turns away who may not ask: without the key, from a web page of elsewhere, or under a foreign name.

    A browser lets any page send requests to this machine, so an Origin that is not ours counts as an attack
    unless it was allowed, and so does a Host that is not one of our names.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, origins: Collection[str], hosts: Collection[str] | None
    ) -> None:
        self.app = app
        self._key, self._origins, self._hosts = api_key, origins, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refused = self._refused(Request(scope))
            if refused is not None:
                await error_response(refused)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refused(self, request: Request) -> ApiError | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self._hosts is not None and _hostname(f"//{host}") not in self._hosts:
            return ApiError(403, f"host {host!r} is not a name of this server", code="host")
        if origin is not None and origin not in self._origins and _netloc(origin) != host:
            return ApiError(403, f"origin {origin!r} is not allowed; see --allow-origin", code="origin")
        if self._key is None or request.url.path in ("/", "/health"):
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key.encode()):
            return ApiError(401, "expected the server's key as Authorization: Bearer", code="invalid_api_key")
        return None


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def error_response(error: ApiError) -> Response:
    wait = {"retry-after": "2"} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers=wait)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, within the limit and in time. A larger one is read and thrown away for a while first."""
    data, size = bytearray(), 0

    async def read() -> None:
        nonlocal size
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                data.extend(chunk)
                continue
            data.clear()
            if size > DISCARD_BYTES:
                return

    try:
        await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        message = f"the body did not come within {BODY_SECONDS:.0f} s; {size} bytes of it came"
        raise ApiError(408, message, code="timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the body was not sent to its end") from None
    if size > limit:
        raise ApiError(413, f"the body has more than {limit} bytes; send less", code="too_large")
    return bytes(data)
