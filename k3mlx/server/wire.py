"""Pieces of an answer as OpenAI's objects and stream frames.

Owns the wire form. Frames follow the stricter reading: the role comes once and first, reasoning, content and
tool calls never share a frame, and the last frame of the answer is an empty delta with the finish reason.
Source: text specification §4.1, §4.3, §4.4.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from k3mlx.channels import CallArguments, CallStarted
from k3mlx.generation import Completion, Piece, TokenLogprob
from k3mlx.kept import Prompt
from k3mlx.tokenizer import Tokenizer


def usage(prompt: Prompt, done: Completion) -> dict[str, Any]:
    """Counts of ids. The opener of the answer's channel at the end of a chat prompt is not counted, as the
    hosted service does not."""
    read = len(prompt.ids) - prompt.opener
    return {
        "prompt_tokens": read,
        "completion_tokens": len(done.ids),
        "total_tokens": read + len(done.ids),
        "prompt_tokens_details": {"cached_tokens": min(done.cached_tokens, read)},
        "completion_tokens_details": {"reasoning_tokens": done.reasoning_tokens},
    }


def finish_reason(done: Completion) -> str:
    """`tool_calls` for a finished message with calls, else why generation ended."""
    if done.tool_calls and done.finish_reason == "stop":
        return "tool_calls"
    return "length" if done.finish_reason == "length" else "stop"


class Wire:
    """Writes one answer. `head` is constant over its frames."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, model: str, prefix: str, kind: str) -> None:
        self._tokenizer = tokenizer
        self.prompt = prompt
        self._kind = kind
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def object(self, choice: dict[str, Any], done: Completion) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head,
            "object": self._kind,
            "choices": [{"index": 0, **choice}],
            "usage": usage(self.prompt, done),
        }

    def frame(self, choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        """A frame with one choice, or with none."""
        kind = "chat.completion.chunk" if self._kind == "chat.completion" else self._kind
        choices = [] if choice is None else [{"index": 0, **choice}]
        return {**self._head, "object": kind, "choices": choices, **more}

    def token(self, id: int) -> str:
        return self._tokenizer.decode([id])

    def token_bytes(self, id: int) -> bytes:
        return self._tokenizer.token_bytes(id)


class ChatWire(Wire):
    """An answer of /v1/chat/completions."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, model: str, *, logprobs: bool) -> None:
        super().__init__(tokenizer, prompt, model, "chatcmpl", "chat.completion")
        self._logprobs = logprobs
        self._channel = "think" if prompt.start == "think" else ""
        self._calls: dict[int, str] = {}

    def first(self) -> list[dict[str, Any]]:
        return [self._delta({"role": "assistant"})]

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """Frames of a piece that is not the last."""
        frames = []
        if piece.channel != self._channel:
            if self._channel == "think":
                frames.append(self._delta({"reasoning_content": ""}))
            self._channel = piece.channel
        if isinstance(piece.event, CallStarted):
            index = len(self._calls)
            self._calls[piece.event.index] = call_id()
            call = {
                "index": index,
                "id": self._calls[piece.event.index],
                "type": "function",
                "function": {"name": piece.event.name, "arguments": ""},
            }
            frames.append(self._delta({"tool_calls": [call]}))
        elif isinstance(piece.event, CallArguments):
            index = list(self._calls).index(piece.event.index)
            call = {"index": index, "function": {"arguments": piece.event.fragment}}
            frames.append(self._delta({"tool_calls": [call]}))
        elif piece.channel == "think":
            frames.append(self._delta({"reasoning_content": piece.text}))
        elif piece.channel == "response":
            frames.append(self._delta({"content": piece.text}, piece.logprobs))
        return frames

    def last(self, done: Completion, include_usage: bool) -> list[dict[str, Any]]:
        counted = usage(self.prompt, done)
        frames = []
        if self._channel == "think" and self.prompt.start == "think":
            frames.append(self._delta({"reasoning_content": ""}))
        reason = finish_reason(done)
        frames.append(self.frame({"delta": {}, "logprobs": None, "finish_reason": reason}, usage=counted))
        if include_usage:
            frames.append(self.frame(None, usage=counted))
        return frames

    def whole(self, done: Completion, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": done.text}
        if done.reasoning:
            message["reasoning_content"] = done.reasoning
        if done.tool_calls:
            message["tool_calls"] = [
                {"id": call_id(), "type": "function", "function": call} for call in done.tool_calls
            ]
        reason = finish_reason(done)
        choice = {"message": message, "logprobs": self._listed(logprobs), "finish_reason": reason}
        return self.object(choice, done)

    def _delta(self, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        listed = self._listed(logprobs) if "content" in delta else None
        return self.frame({"delta": delta, "logprobs": listed, "finish_reason": None})

    def _listed(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {**self._one(entry.id, entry.logprob), "top_logprobs": [self._one(*top) for top in entry.top]}
                for entry in logprobs
            ],
            "refusal": None,
        }

    def _one(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.token(id), "bytes": list(self.token_bytes(id)), "logprob": finite(logprob)}


class TextWire(Wire):
    """An answer of /v1/completions."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Prompt, model: str, *, logprobs: bool, echo: str
    ) -> None:
        super().__init__(tokenizer, prompt, model, "cmpl", "text_completion")
        self._logprobs = logprobs
        self._echo = echo
        self._offset = len(echo)

    def first(self) -> list[dict[str, Any]]:
        return [self._text(self._echo)] if self._echo else []

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._text(piece.text, piece.logprobs)]

    def last(self, done: Completion, include_usage: bool) -> list[dict[str, Any]]:
        counted = usage(self.prompt, done)
        frames = [
            self.frame({"text": "", "logprobs": None, "finish_reason": finish_reason(done)}, usage=counted)
        ]
        if include_usage:
            frames.append(self.frame(None, usage=counted))
        return frames

    def whole(self, done: Completion, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        choice = {
            "text": self._echo + done.text,
            "logprobs": self._listed(logprobs),
            "finish_reason": finish_reason(done),
        }
        return self.object(choice, done)

    def _text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        return self.frame({"text": text, "logprobs": self._listed(logprobs), "finish_reason": None})

    def _listed(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        offsets = []
        for entry in logprobs:
            offsets.append(self._offset)
            self._offset += len(self.token(entry.id))
        return {
            "tokens": [self.token(entry.id) for entry in logprobs],
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                {self.token(id): finite(value) for id, value in entry.top} for entry in logprobs
            ],
            "text_offset": offsets,
        }


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def finite(logprob: float) -> float:
    """A log probability as JSON can hold it; OpenAI writes -9999 for none."""
    return max(logprob, -9999.0)
