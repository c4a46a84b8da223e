"""The thread that owns the engine: loads it, answers one request after the other, lets it go.

Owns jobs, their turn, cancellation and the numbers that /metrics shows. Everything that touches the model
runs here; the HTTP side only submits jobs and reads their events. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from k3mlx.engine import Engine
from k3mlx.errors import K3Error, UsageError
from k3mlx.generation import (
    Constraint,
    Piece,
    RunOptions,
    chat_prompt,
    raw_prompt,
    run_prompt,
    sampling_options,
)
from k3mlx.grammar import AVAILABLE, Grammars
from k3mlx.kept import KeptSessions, Prompt

from .failures import ApiError, from_error
from .queue import FairQueue
from .requests import Ask

REPORT_SECONDS = 0.25  # between two looks at the engine's counters during an answer

MakeConstraint = Callable[[], Constraint]
GONE = object()  # event of a job whose client has left


@dataclass
class Job:
    """One request on its way through the worker. Its events are pieces, an ApiError, or GONE."""

    ask: Ask
    prompt: Prompt
    options: RunOptions
    constraint: MakeConstraint | None = None
    client: str = ""
    state: str = "waiting"  # then reading, writing
    progress: tuple[int, int] = (0, 0)  # prompt ids read, of how many
    cancelled: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def emit(self, event: Any) -> None:
        """Hand an event over to the HTTP side; after its loop has ended, nobody listens."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


@dataclass
class Totals:
    """What has been answered since start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    answers: int = 0
    cancelled: int = 0
    failed: int = 0


class Worker(threading.Thread):
    """Answers jobs in turn. `state` goes from loading to ready to stopped, or to failed."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        *,
        queue_limit: int,
        keep_bytes: int,
        keep_disk_bytes: int = 0,
        on_ready: Callable[[Engine], None] = lambda engine: None,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        super().__init__(name="k3mlx-worker", daemon=True)
        self.state = "loading"
        self.engine: Engine | None = None
        self.totals = Totals()
        self.report: dict[str, Any] = {}
        self.kept_bytes = (0, 0)
        self.running: Job | None = None
        self._open_engine = open_engine
        self._queue_limit = queue_limit
        self._keep = (keep_bytes, keep_disk_bytes)
        self._on_ready, self._on_failure = on_ready, on_failure
        self._waiting: FairQueue[Job] = FairQueue()
        self._turn = threading.Condition()
        self._reported = 0.0
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()

    @property
    def queue_length(self) -> int:
        return len(self._waiting)

    def prepare(self, ask: Ask) -> tuple[Prompt, RunOptions, MakeConstraint | None]:
        """Prompt ids, options and constraint of a request; any thread may call it once the worker is ready.

        Raises UsageError for input that cannot be used.
        """
        engine = self.ready_engine()
        if ask.kind == "chat":
            prompt = chat_prompt(engine.tokenizer, list(ask.messages), **ask.render)
        elif isinstance(ask.prompt, str):
            prompt = raw_prompt(engine.tokenizer, ask.prompt)
        else:
            prompt = Prompt(ask.prompt)
        _check(engine, prompt)
        options = RunOptions(
            sampling_options(engine, ask.sampling),
            max_tokens=ask.max_tokens,
            stop=ask.stop,
            top_logprobs=ask.top_logprobs,
            one_call=ask.one_call,
            stream_arguments=ask.stream,
        )
        return prompt, options, self._constraint(engine, ask, prompt)

    def _constraint(self, engine: Engine, ask: Ask, prompt: Prompt) -> MakeConstraint | None:
        """What holds the answer to its form: JSON, or calls where a call is demanded.

        `required` is only asked for in the prompt where llguidance is not installed; JSON and a named
        function are refused there.
        """
        render = ask.render
        form = (render.get("response_format") or {}).get("type", "text")
        tools = [] if render.get("tool_choice") == "none" else list(render.get("tools") or [])
        demanded = ask.function is not None or (render.get("tool_choice") == "required" and AVAILABLE)
        if form == "text" and not demanded:
            return None
        if ask.messages[-1].get("partial"):
            raise UsageError("a partial message cannot be held to a form; remove partial or the form")
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = Grammars(engine.tokenizer)
        start = prompt.start or ""
        if demanded:
            named = [tool for tool in tools if ask.function in (None, tool["function"]["name"])]
            if not named:
                raise UsageError(f"tool_choice names {ask.function!r}; expected one of the declared tools")
            return self._grammars.calls(start, named)
        schema = (
            {"type": "object"}
            if form == "json_object"
            else render["response_format"]["json_schema"]["schema"]
        )
        return self._grammars.json(start, schema, tools)

    def ready_engine(self) -> Engine:
        """The engine, or the reason why there is none (ApiError 503)."""
        if self.state != "ready" or self.engine is None:
            reason = {"loading": "the model is loading; try again soon", "stopped": "the server is stopping"}
            raise ApiError(503, reason.get(self.state, "the model could not be loaded"), code=self.state)
        return self.engine

    def submit(self, job: Job) -> None:
        """Put a job in line. Raises ApiError when the line is full or the server stops."""
        with self._turn:
            self.ready_engine()
            if len(self._waiting) >= self._queue_limit:
                message = f"{self._queue_limit} requests are waiting already; try again later"
                raise ApiError(429, message, code="queue_full")
            self._waiting.put(job.client, job)
            self._turn.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job any more: drop it, or stop it between two layers."""
        job.cancelled = True
        with self._turn:
            if self._waiting.remove(job):
                self.totals.cancelled += 1

    def ahead(self, job: Job) -> int:
        """How many requests come before a waiting one, the running one included."""
        with self._turn:
            return self._waiting.ahead(job) + (self.running is not None)

    def drain(self) -> None:
        """Accept nothing more, refuse what waits, let the running answer go on."""
        with self._turn:
            if self.state in ("ready", "loading"):
                self.state = "stopped"
            while len(self._waiting):
                self._waiting.take().emit(ApiError(503, "the server is stopping", code="stopped"))
            self._turn.notify()

    def stop(self) -> None:
        """Drain, and stop the running answer between two layers."""
        self.drain()
        running = self.running
        if running is not None:
            running.cancelled = True

    def run(self) -> None:
        try:
            engine = self._open_engine()
            engine.tokenizer  # noqa: B018 - read now, so that a missing vocabulary ends the start
        except BaseException as error:
            self.state = "failed"
            self._on_failure(error)
            return
        kept = KeptSessions(engine, *self._keep)
        self.engine = engine
        self._look(engine, kept)
        with self._turn:
            if self.state == "loading":
                self.state = "ready"
        self._on_ready(engine)
        try:
            while (job := self._next()) is not None:
                self._answer(engine, kept, job)
                self.running = None
                self._look(engine, kept)
        finally:
            kept.close()
            engine.close()

    def _next(self) -> Job | None:
        with self._turn:
            while not len(self._waiting):
                if self.state == "stopped":
                    return None
                self._turn.wait()
            self.running = self._waiting.take()
            return self.running

    def _answer(self, engine: Engine, kept: KeptSessions, job: Job) -> None:
        try:
            for piece in self._pieces(engine, kept, job):
                if piece.completion is not None:
                    self._count(piece)
                job.emit(piece)
        except K3Error as error:
            self.totals.failed += 1
            job.emit(from_error(error))
        except Exception as error:
            self.totals.failed += 1
            traceback.print_exc(file=sys.stderr)
            job.emit(ApiError(500, f"internal error: {type(error).__name__}: {error}"))

    def _pieces(self, engine: Engine, kept: KeptSessions, job: Job) -> Iterator[Piece]:
        def on_progress(fed: int, total: int) -> None:
            job.progress = (fed, total)
            self._look(engine, kept)

        job.state, job.progress = "reading", (0, len(job.prompt.ids))
        constraint = job.constraint() if job.constraint else None
        for piece in run_prompt(
            engine,
            job.prompt,
            job.options,
            kept=kept,
            constraint=constraint,
            should_stop=lambda: job.cancelled,
            on_progress=on_progress,
        ):
            job.state = "writing"
            if time.monotonic() - self._reported > REPORT_SECONDS:
                self._look(engine, kept)
            yield piece

    def _count(self, piece: Piece) -> None:
        done, totals = piece.completion, self.totals
        assert done is not None, "the last piece carries the completion"
        totals.answers += done.finish_reason != "cancelled"
        totals.cancelled += done.finish_reason == "cancelled"
        totals.prompt_tokens += len(done.prompt_ids)
        totals.cached_tokens += done.cached_tokens
        totals.generated_tokens += len(done.ids)

    def _look(self, engine: Engine, kept: KeptSessions) -> None:
        self.report = engine.report()
        self.kept_bytes = kept.used
        self._reported = time.monotonic()


def _check(engine: Engine, prompt: Prompt) -> None:
    """Refuse what the session would refuse, before a stream begins."""
    room, size = engine.config.max_position_embeddings, engine.config.vocab_size
    if len(prompt.ids) > room:
        message = (
            f"the prompt has {len(prompt.ids)} tokens; expected at most {room}, the context of this model"
        )
        raise ApiError(400, f"{message}: shorten it", code="context_length_exceeded", param="messages")
    wrong = next((id for id in prompt.ids if not 0 <= id < size), None)
    if wrong is not None:
        raise ApiError(400, f"token id {wrong}; expected 0 to {size - 1}", param="prompt")
