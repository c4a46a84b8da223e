"""Answers on their way out: a job's events to one object or to a stream, and what a leaving client means.

Owns the pairing of a connection with its job. The wire form of a frame is `wire.py`, jobs are `worker.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from k3mlx.generation import Piece, TokenLogprob

from .failures import ApiError
from .wire import ChatWire, TextWire
from .worker import GONE, Job, Worker


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


async def whole_answer(worker: Worker, job: Job, wire: ChatWire | TextWire, request: Request) -> Response:
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


class StreamedAnswer(Response):
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
