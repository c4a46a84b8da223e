"""From a prompt to text: rendering, the decode loop, stop ids, channels, the report of one run.

Owns the loop and its results. Printing belongs to the commands, sampling to `sampling.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .channels import CallClosed, Event, OutputParser, Text, start_mode
from .chat import render
from .engine import Cancelled, Engine, Session
from .errors import ModelFilesError, UsageError
from .sampling import Sampler, SamplingOptions
from .tokenizer import StreamDecoder, Tokenizer

MAX_TOKENS = 512


@dataclass
class Completion:
    """All of one answer. `text` is the response, or the whole continuation of a raw prompt.

    finish_reason: `stop` (the model ended its turn), `length` (max_tokens or context) or `cancelled`.
    tool_calls: objects with `name` and `arguments` (JSON text). report: `Engine.report` of this run alone.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    report: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self)


@dataclass(frozen=True)
class Piece:
    """What one step added: complete characters of a channel, `think`, `response`, `tools` or `text` (raw).

    ids are those decoded since the piece before. The last piece has no text and carries the completion.
    """

    channel: str
    text: str
    ids: tuple[int, ...] = ()
    completion: Completion | None = None

    @property
    def report(self) -> dict[str, Any] | None:
        """The report of the run, on the last piece."""
        return self.completion.report if self.completion else None


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
    session: Session | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Piece]:
    """Generate from a prompt (one user message, or plain text with `raw`) or from chat messages.

    Yields pieces as they come; the last one carries the completion. Sampling options left None are
    the snapshot's own, else temp 1.0 and top_p 0.95. With `session` the prompt continues it.
    `should_stop` is asked between layers; what was generated until then is kept. Arguments are checked
    before anything runs. Raises UsageError for input that cannot be used.
    """
    if (prompt is None) == (messages is None):
        raise UsageError("give either a prompt or messages")
    if prompt == "":
        raise UsageError("the prompt is empty: expected some text")
    if raw and messages is not None:
        raise UsageError("raw continues plain text: give a prompt, not messages")
    if max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}, expected at least 1")
    given = {"temp": temp, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    chosen = {name: value for name, value in given.items() if value is not None}
    sampler = Sampler(SamplingOptions(**(sampling_defaults(engine.folder) | chosen)))  # type: ignore[arg-type]
    reader: _RawReader | _ChatReader
    if raw:
        prompt_ids = engine.tokenizer.encode(prompt or "")
        reader = _RawReader(engine.tokenizer)
    else:
        turns = messages if messages is not None else [{"role": "user", "content": prompt}]
        segments = render(turns, tools=tools, thinking=thinking, effort=effort)
        prompt_ids = engine.tokenizer.encode_segments(segments)
        reader = _ChatReader(engine.tokenizer, start_mode(segments))
    session = engine.session() if session is None else session  # an empty session is falsy
    return _run(engine, session, prompt_ids, reader, sampler, max_tokens, should_stop)


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


def _run(
    engine: Engine,
    session: Session,
    prompt_ids: list[int],
    reader: _RawReader | _ChatReader,
    sampler: Sampler,
    max_tokens: int,
    should_stop: Callable[[], bool] | None,
) -> Iterator[Piece]:
    done = Completion(prompt_ids=prompt_ids)
    before = engine.report()
    pending: list[int] = []  # ids that have not completed a piece yet
    room = engine.config.max_position_embeddings - len(session) - len(prompt_ids)
    try:
        logits = session.feed(prompt_ids, should_stop=should_stop)
        while True:
            id = sampler(logits)
            engine.counters.generated_tokens += 1
            done.ids.append(id)
            pending.append(id)
            stopped = id in engine.tokenizer.stop_ids
            for channel, text in reader.feed(id):
                yield Piece(channel, text, tuple(pending))
                pending.clear()
            if stopped or len(done.ids) >= min(max_tokens, room + 1):
                done.finish_reason = "stop" if stopped else "length"
                break
            logits = session.feed([id], should_stop=should_stop)
    except Cancelled:
        done.finish_reason = "cancelled"
    for channel, text in reader.finish():
        yield Piece(channel, text, tuple(pending))
        pending.clear()
    done.text, done.reasoning, done.tool_calls = reader.text, reader.reasoning, reader.tool_calls
    done.report = _since(before, engine.report())
    yield Piece(reader.channel, "", tuple(pending), done)


class _RawReader:
    """Ids of a plain continuation to text."""

    channel = "text"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder()
        self.text, self.reasoning = "", ""
        self.tool_calls: list[dict[str, str]] = []

    def feed(self, id: int) -> list[tuple[str, str]]:
        if id in self._tokenizer.stop_ids:
            return self.finish()
        return self._add(self._decoder.feed(self._tokenizer.token_bytes(id)))

    def finish(self) -> list[tuple[str, str]]:
        return self._add(self._decoder.flush())

    def _add(self, text: str) -> list[tuple[str, str]]:
        self.text += text
        return [(self.channel, text)] if text else []


class _ChatReader:
    """Ids of an answer to its channels."""

    def __init__(self, tokenizer: Tokenizer, mode: str) -> None:
        self._tokenizer = tokenizer
        self._parser = OutputParser(mode)
        self.channel = mode
        self.text, self.reasoning = "", ""
        self.tool_calls: list[dict[str, str]] = []

    def feed(self, id: int) -> list[tuple[str, str]]:
        return self._add(self._parser.feed(self._tokenizer.piece(id)))

    def finish(self) -> list[tuple[str, str]]:
        return self._add(self._parser.finish())

    def _add(self, events: list[Event]) -> list[tuple[str, str]]:
        shown = []
        for event in events:
            if isinstance(event, Text):
                self.channel = event.channel
                if event.channel == "think":
                    self.reasoning += event.text
                else:
                    self.text += event.text
                shown.append((event.channel, event.text))
            elif isinstance(event, CallClosed):
                self.channel = "tools"
                self.tool_calls.append({"name": event.name, "arguments": event.arguments})
                shown.append((self.channel, f"{event.name}({event.arguments})\n"))
        return shown


_NOT_COUNTERS = {"peak_memory_bytes", "prefill_chunk", "io_threads", "cache_bytes", "resident_bytes"}


def _since(before: Any, after: Any, name: str = "") -> Any:
    """The report of what happened between two reports of one engine: counts and times subtracted."""
    if isinstance(after, dict):
        return {key: _since(before[key], value, key) for key, value in after.items()}
    if isinstance(after, list):
        return [_since(old, new) for old, new in zip(before, after, strict=True)]
    if isinstance(after, bool) or not isinstance(after, (int, float)) or name in _NOT_COUNTERS:
        return after
    return after - before
