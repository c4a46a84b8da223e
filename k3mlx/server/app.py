"""The HTTP side: routes, who may ask, bodies within limits, answers as they come.

Owns the ASGI application. Validation is `requests.py`, the model's side `worker.py`, the wire form `wire.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from k3mlx import __version__
from k3mlx.errors import K3Error
from k3mlx.generation import Piece, TokenLogprob

from . import metrics
from .failures import ApiError, from_error
from .requests import Ask, Limits, read_chat, read_json, read_text
from .wire import ChatWire, TextWire
from .worker import GONE, Job, Worker

BODY_SECONDS = 30.0  # to send a body
DISCARD_BYTES = 256_000_000  # of a body that is too large, so that its sender gets to read why
PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Settings:
    """How the server presents itself. hosts: names by which it may be addressed, None for any."""

    model: str
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    comment_seconds: float = 5.0  # between signs of life in a stream that waits


def make_app(worker: Worker, settings: Settings) -> Starlette:
    """The application; requests are refused with 503 until the worker is ready."""
    api = _Api(worker, settings)
    middleware = [Middleware(_Guard, settings=settings)]
    if settings.origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"]
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.text, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/", api.page),
        ],
        middleware=middleware,
        exception_handlers={ApiError: _refuse, HTTPException: _refuse_http, Exception: _refuse_bug},
    )


class _Api:
    """The endpoints."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker = worker
        self.settings = settings

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat)

    async def text(self, request: Request) -> Response:
        return await self._answer(request, read_text)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.settings.model:
            raise ApiError(404, f"model {name!r} is not served here", code="model_not_found", param="model")
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        worker = self.worker
        body = {
            "status": "ok" if worker.state == "ready" else worker.state,
            "model": self.settings.model,
            "version": __version__,
            "waiting": worker.queue_length,
            "running": worker.running is not None,
        }
        return JSONResponse(body, 200 if worker.state == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics.text(self.worker), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        sources = ("default-src 'none'", "connect-src 'self'", "img-src data:")
        policy = "; ".join((*sources, "script-src 'unsafe-inline'", "style-src 'unsafe-inline'"))
        return Response(
            PAGE.read_bytes(), media_type="text/html", headers={"content-security-policy": policy}
        )

    def _model(self) -> dict[str, Any]:
        engine = self.worker.engine
        context = {} if engine is None else {"context_length": engine.config.max_position_embeddings}
        return {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "k3mlx", **context}

    async def _answer(self, request: Request, read: Callable[..., Ask]) -> Response:
        body = read_json(await _body(request, self.settings.limits.body_bytes))
        ask = read(body, self.settings.limits, self.settings.model)
        try:
            prompt, options, constraint = await run_in_threadpool(self.worker.prepare, ask)
        except K3Error as error:
            raise from_error(error) from None
        tokenizer = self.worker.ready_engine().tokenizer
        wire: ChatWire | TextWire
        if ask.kind == "chat":
            wire = ChatWire(tokenizer, prompt, self.settings.model, logprobs=ask.top_logprobs is not None)
        else:
            echo = tokenizer.decode(prompt.ids) if ask.echo else ""
            logprobs = ask.top_logprobs is not None
            wire = TextWire(tokenizer, prompt, self.settings.model, logprobs=logprobs, echo=echo)
        host = request.client.host if request.client else ""
        job = Job(ask, prompt, options, constraint, client=f"{host} {ask.user}")
        self.worker.submit(job)
        if ask.stream:
            return _Stream(self.worker, job, wire, self.settings.comment_seconds)
        return await _whole(self.worker, job, wire, request)


async def _events(worker: Worker, job: Job, receive: Receive, seconds: float | None) -> AsyncIterator[Any]:
    """Events of a job to its end, None after `seconds` without one; nothing once the client has left.

    However this ends, the job ends with it.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        worker.cancel(job)
        job.events.put_nowait(GONE)

    watcher = asyncio.create_task(watch())
    try:
        while True:
            try:
                event = await asyncio.wait_for(job.events.get(), seconds)
            except asyncio.TimeoutError:
                yield None
                continue
            if event is GONE:
                return
            yield event
            if isinstance(event, ApiError) or event.completion is not None:
                return
    finally:
        watcher.cancel()
        worker.cancel(job)


async def _whole(worker: Worker, job: Job, wire: ChatWire | TextWire, request: Request) -> Response:
    """The answer in one object."""
    logprobs: list[TokenLogprob] = []
    async for event in _events(worker, job, request.receive, None):
        if isinstance(event, ApiError):
            raise event
        piece: Piece = event
        logprobs += piece.logprobs
        if piece.completion is not None:
            if piece.completion.finish_reason == "cancelled":
                raise ApiError(503, "the server is stopping", code="stopped")
            return JSONResponse(wire.whole(piece.completion, logprobs))
    return Response(status_code=499)  # nobody reads it


class _Stream(Response):
    """The answer as server-sent events, with comments while nothing else comes."""

    def __init__(self, worker: Worker, job: Job, wire: ChatWire | TextWire, seconds: float) -> None:
        super().__init__()
        self._worker, self._job, self._wire, self._seconds = worker, job, wire, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        job, wire = self._job, self._wire
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            started = False
            async for event in _events(self._worker, job, receive, self._seconds):
                if event is None:
                    await write(f": {self._comment()}\n\n")
                    continue
                if isinstance(event, ApiError):
                    await write(_data(event.body()))
                    break
                if not started:
                    await write("".join(map(_data, wire.first())))
                    started = True
                await write("".join(map(_data, self._frames(event))))
            await write("data: [DONE]\n\n")
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._worker.cancel(job)

    def _frames(self, piece: Piece) -> list[dict[str, Any]]:
        done = piece.completion
        if done is None:
            return self._wire.piece(piece)
        if done.finish_reason == "cancelled":
            return [ApiError(503, "the server is stopping", code="stopped").body()]
        return self._wire.last(done, self._job.ask.include_usage)

    def _comment(self) -> str:
        if self._job.state == "waiting":
            return f"waiting, {self._worker.ahead(self._job)} before this request"
        read, total = self._job.progress
        return f"reading the prompt, {read} of {total} tokens" if read < total else "writing"


def _data(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _body(request: Request, limit: int) -> bytes:
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


class _Guard:
    """Turns away who may not ask: without the key, from a web page of elsewhere, or under a foreign name.

    A browser lets any page send requests to this machine, so an Origin that is not ours counts as an attack
    unless it was allowed, and so does a Host that is not one of our names.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refused = self._refused(Request(scope))
            if refused is not None:
                await _json_error(refused)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refused(self, request: Request) -> ApiError | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        names = self.settings.hosts
        if names is not None and _hostname(f"//{host}") not in names:
            return ApiError(403, f"host {host!r} is not a name of this server", code="host")
        if origin is not None and origin not in self.settings.origins and _netloc(origin) != host:
            return ApiError(403, f"origin {origin!r} is not allowed; see --allow-origin", code="origin")
        if self.settings.api_key is None or request.url.path in ("/", "/health"):
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.strip().encode(), self.settings.api_key.encode()
        ):
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


def _json_error(error: ApiError) -> Response:
    wait = {"retry-after": "2"} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers=wait)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for this type"
    return _json_error(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this type"
    where = f"{request.method} {request.url.path}"
    reasons = {404: f"{where} does not exist", 405: f"{where} is not a method of this path"}
    return _json_error(ApiError(error.status_code, reasons.get(error.status_code, str(error.detail))))


async def _refuse_bug(request: Request, error: Exception) -> Response:
    return _json_error(ApiError(500, f"internal error: {type(error).__name__}"))
