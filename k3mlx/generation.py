"""From a prompt to text: rendering, the decode loop, stop ids, the report of one run.

Owns the loop and its results. Reading ids back is `readers.py`, sampling `sampling.py`, which sessions are
kept `kept.py`; printing belongs to the commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import markers
from .channels import Event, start_mode
from .chat import render
from .engine import Cancelled, Engine, Session
from .errors import ModelFilesError, UsageError
from .kept import KeptSessions, Prompt
from .readers import ChatReader, RawReader, Shown
from .sampling import Sampler, SamplingOptions
from .tokenizer import Tokenizer

MAX_TOKENS = 512


@dataclass
class Completion:
    """All of one answer. `text` is the response, or the whole continuation of a raw prompt.

    finish_reason: `stop` (the model ended its turn), `length` (max_tokens or context) or `cancelled`.
    tool_calls: objects with `name` and `arguments` (JSON text). report: `Engine.report` of this run alone.
    cached_tokens: prompt ids that a kept session had read before. reasoning_tokens: ids of the thinking.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self)


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a drawn id before temperature and filters, and the `top` most probable ids with theirs."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """What one step added: complete characters of a channel, `think`, `response`, `tools` or `text` (raw).

    ids are those decoded since the piece before, logprobs (if asked for) those of the ids of visible text.
    event is what happened to a tool call. The last piece has no text and carries the completion.
    """

    channel: str
    text: str
    ids: tuple[int, ...] = ()
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    event: Event | None = None

    @property
    def report(self) -> dict[str, Any] | None:
        """The report of the run, on the last piece."""
        return self.completion.report if self.completion else None


class Constraint(Protocol):
    """Decides which ids may come next; one object serves one answer."""

    def mask(self, logits: np.ndarray) -> np.ndarray:
        """The logits [V], minus infinity where an id is not allowed."""

    def accept(self, id: int) -> None:
        """The id was drawn."""


@dataclass(frozen=True)
class RunOptions:
    """How one answer is made, beyond its prompt. Raises UsageError for a value out of range.

    stop: strings that end the answer where they would appear in visible text; they are not shown.
    top_logprobs: give log probabilities, and those of so many alternatives. one_call: end after a tool call.
    stream_arguments: tool calls come as events while they are written, see `OutputParser`.
    """

    sampling: SamplingOptions
    max_tokens: int = MAX_TOKENS
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    one_call: bool = False
    stream_arguments: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}, expected at least 1")
        if not all(self.stop):
            raise UsageError("a stop string is empty: expected some text")


def stream_generate(
    engine: Engine,
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    raw: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = None,
    max_tokens: int = MAX_TOKENS,
    temp: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    session: Session | None = None,
    kept: KeptSessions | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Piece]:
    """Generate from a prompt (one user message, or plain text with `raw`) or from chat messages.

    Yields pieces as they come; the last one carries the completion. Sampling options left None are the
    snapshot's own, else temp 1.0 and top_p 0.95. With `session` the prompt continues it; with `kept` the
    longest kept beginning of the prompt is not read again. `stop` strings end the answer. `should_stop` is
    asked between layers; what was generated until then is kept. Arguments are checked before anything
    runs. Raises UsageError for input that cannot be used.
    """
    if (prompt is None) == (messages is None):
        raise UsageError("give either a prompt or messages")
    if prompt == "":
        raise UsageError("the prompt is empty: expected some text")
    if raw and messages is not None:
        raise UsageError("raw continues plain text: give a prompt, not messages")
    given = {"temp": temp, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    options = RunOptions(sampling_options(engine, given), max_tokens, tuple(stop))
    if raw:
        asked = raw_prompt(engine.tokenizer, prompt or "")
    else:
        turns = messages if messages is not None else [{"role": "user", "content": prompt}]
        asked = chat_prompt(engine.tokenizer, turns, tools=tools, thinking=thinking, effort=effort)
    return run_prompt(engine, asked, options, session=session, kept=kept, should_stop=should_stop)


def raw_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Plain text to be continued."""
    return Prompt(tuple(tokenizer.encode(text)))


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
    """A conversation to be answered; `options` are those of `chat.render`."""
    segments = render(messages, **options)
    ids: list[int] = []
    borders: list[int] = []
    roles: list[str] = []
    for index, (text, allow_special) in enumerate(segments):
        ids += tokenizer.encode(text, allow_special)
        if text == " role" and not allow_special and segments[index - 1].text == "message":
            roles.append(segments[index + 2].text)
        elif text == markers.END_OF_MSG and allow_special:
            borders.append(len(ids))
    shared = next((place for place, role in enumerate(roles) if role != "system"), 0)
    tail = segments[-3:]
    opens = [text for text, _ in tail[::2]] == [markers.OPEN, markers.SEP] and all(s for _, s in tail[::2])
    opener = len(tokenizer.encode_segments(tail)) if opens else 0
    return Prompt(tuple(ids), start_mode(segments), tuple(borders), shared, opener)


def sampling_options(engine: Engine, given: Mapping[str, Any]) -> SamplingOptions:
    """Sampling as asked for; what is None is the snapshot's own, else the defaults of `SamplingOptions`."""
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingOptions(**(sampling_defaults(engine.folder) | chosen))


def complete(engine: Engine, prompt: str | None = None, **options: Any) -> Completion:
    """`stream_generate` run to its end (same arguments), as one Completion."""
    *_, last = stream_generate(engine, prompt, **options)
    assert last.completion is not None, "a run ends with a completion"
    return last.completion


def generate(engine: Engine, prompt: str | None = None, **options: Any) -> str:
    """The response text to a prompt or to messages; arguments of `stream_generate`."""
    return complete(engine, prompt, **options).text


def sampling_defaults(folder: Path) -> dict[str, float | int]:
    """Sampling options that a snapshot's generation_config.json names.

    Raises ModelFilesError when the file is not a JSON object or a value is not a number.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(values, dict):
        raise ModelFilesError(f"{path}: expected a JSON object")
    found: dict[str, float | int] = {}
    for name, ours in (("temperature", "temp"), ("top_p", "top_p"), ("top_k", "top_k"), ("min_p", "min_p")):
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if ours == "top_k" else (int, float)):
            raise ModelFilesError(f"{path}: {name} is {value!r}, expected a number")
        found[ours] = value
    return found


def run_prompt(
    engine: Engine,
    prompt: Prompt,
    options: RunOptions,
    *,
    session: Session | None = None,
    kept: KeptSessions | None = None,
    constraint: Constraint | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Piece]:
    """The decode loop behind `stream_generate`, for a prompt that is ids already.

    With `kept`, a session that begins the prompt is taken from there and what is fed is kept there.
    `on_progress` is told (prompt ids fed, of how many) while the prompt is read.
    """
    if kept is not None:
        session = kept.resume(prompt.ids)
    elif session is None:  # an empty session is falsy
        session = engine.session()
    cached = len(session) if kept is not None else 0
    done = Completion(prompt_ids=list(prompt.ids), cached_tokens=cached)
    reader: RawReader | ChatReader = RawReader(engine.tokenizer, options.stop)
    if prompt.start is not None:
        reader = ChatReader(engine.tokenizer, prompt.start, options.stop, options.stream_arguments)
    before = engine.report()
    pending: list[int] = []  # ids that have not completed a piece yet
    logprobs: list[TokenLogprob] = []  # of the visible ones among them

    def pieces(shown: list[Shown]) -> Iterator[Piece]:
        for channel, text, event in shown:
            visible = channel in ("response", "text")
            yield Piece(channel, text, tuple(pending), None, tuple(logprobs) if visible else (), event)
            pending.clear()
            if visible:
                logprobs.clear()

    sampler = Sampler(options.sampling)
    room = engine.config.max_position_embeddings - len(session) - len(prompt.ids) + cached
    try:
        logits = _feed_prompt(session, prompt, cached, kept, should_stop, on_progress)
        while True:
            allowed = logits if constraint is None else constraint.mask(logits)
            id = sampler(allowed)
            if constraint is not None:
                constraint.accept(id)
            engine.counters.generated_tokens += 1
            done.ids.append(id)
            done.reasoning_tokens += reader.thinking
            pending.append(id)
            if options.top_logprobs is not None and reader.visible(id):
                logprobs.append(token_logprob(logits, id, options.top_logprobs))
            yield from pieces(reader.feed(id))
            stopped = id in engine.tokenizer.stop_ids or reader.stopped
            stopped |= options.one_call and bool(reader.tool_calls)
            if stopped or len(done.ids) >= min(options.max_tokens, room + 1):
                done.finish_reason = "stop" if stopped else "length"
                break
            logits = session.feed([id], should_stop=should_stop)
    except Cancelled:
        done.finish_reason = "cancelled"
    finally:
        if kept is not None:
            kept.keep(session)
    yield from pieces(reader.finish())
    done.text, done.reasoning, done.tool_calls = reader.text, reader.reasoning, reader.tool_calls
    done.report = report_since(before, engine.report())
    yield Piece(reader.channel, "", tuple(pending), done)


def _feed_prompt(
    session: Session,
    prompt: Prompt,
    cached: int,
    kept: KeptSessions | None,
    should_stop: Callable[[], bool] | None,
    on_progress: Callable[[int, int], None] | None,
) -> np.ndarray:
    """Logits [V] after the prompt's ids from `cached` on; pauses where a kept session is worth having."""
    at, total = cached, len(prompt.ids)
    pauses = [] if kept is None else prompt.pauses(session.engine.prefill_step_size, cached)
    for end in [*(pause for pause in pauses if pause < total), total]:

        def on_pass(fed: int, start: int = at) -> None:
            if on_progress is not None:
                on_progress(start + fed, total)

        logits = session.feed(prompt.ids[at:end], should_stop=should_stop, on_pass=on_pass)
        if kept is not None and (end < total or not prompt.borders):  # plain text may be continued anywhere
            kept.keep(session)
        at = end
    return logits


def token_logprob(logits: np.ndarray, id: int, top: int) -> TokenLogprob:
    """Log softmax of logits [V] at `id` and at the `top` largest, equal ones by rising id."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    best = np.argsort(-values, kind="stable")[:top]
    return TokenLogprob(id, float(values[id]), tuple((int(n), float(values[n])) for n in best))


_NOT_COUNTERS = {
    "peak_memory_bytes", "prefill_chunk", "memory", "io_threads", "cache_bytes", "resident_bytes",
    "lookahead_recall", "lookahead_depth", "rank",
}  # fmt: skip


def report_since(before: Any, after: Any, name: str = "") -> Any:
    """The report of what happened between two reports of one engine: counts and times subtracted."""
    if name in _NOT_COUNTERS or isinstance(after, bool):
        return after
    if isinstance(after, dict):
        return {key: report_since(before[key], value, key) for key, value in after.items()}
    if isinstance(after, list):
        return [report_since(old, new) for old, new in zip(before, after, strict=True)]
    if not isinstance(after, (int, float)):
        return after
    return after - before
