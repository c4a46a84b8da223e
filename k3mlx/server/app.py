"""The application: routes, and a request's way through the server.

Who may ask is `guard.py`, what a body may say `requests.py`, the model's side `worker.py`, the way back
`answers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from k3mlx import __version__
from k3mlx.errors import K3Error

from . import metrics
from .answers import StreamedAnswer, whole_answer
from .failures import ApiError, from_error
from .guard import Guard, error_response, read_body
from .requests import Ask, Limits, read_chat, read_json, read_text
from .wire import ChatWire, TextWire
from .worker import Job, Worker

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
    middleware = [Middleware(Guard, api_key=settings.api_key, origins=settings.origins, hosts=settings.hosts)]
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
        body = read_json(await read_body(request, self.settings.limits.body_bytes))
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
            return StreamedAnswer(self.worker, job, wire, self.settings.comment_seconds)
        return await whole_answer(self.worker, job, wire, request)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for this type"
    return error_response(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this type"
    where = f"{request.method} {request.url.path}"
    reasons = {404: f"{where} does not exist", 405: f"{where} is not a method of this path"}
    return error_response(ApiError(error.status_code, reasons.get(error.status_code, str(error.detail))))


async def _refuse_bug(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, f"internal error: {type(error).__name__}"))
