"""A chat as a list of messages that is answered, taken back, saved and loaded.

Owns the messages and their file (a session file with the messages as a note). Which states stay in memory is
`kept.py`, the decode loop `generation.py`; printing belongs to the commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from .engine import Engine, Session
from .errors import ModelFilesError
from .generation import Piece, RunOptions, chat_prompt, run_prompt
from .kept import KeptSessions

_NOTE = "conversation"


class Conversation:
    """Messages in OpenAI's form; `system` stands before them. What was read before is not read again."""

    def __init__(
        self,
        engine: Engine,
        kept: KeptSessions,
        *,
        system: str | None = None,
        thinking: bool = True,
        effort: str | None = None,
    ) -> None:
        self.engine = engine
        self.kept = kept
        self.system = system
        self.thinking = thinking
        self.effort = effort
        self.messages: list[dict[str, Any]] = []

    def ask(
        self,
        text: str,
        options: RunOptions,
        should_stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Generator[Piece, None, None]:
        """Answer a message; the pieces of `stream_generate`.

        An answer that was cut short is kept as far as it came. If nothing came, or the message cannot be
        used (UsageError), the conversation is as before.
        """
        self.messages.append({"role": "user", "content": text})
        answer: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        try:
            prompt = chat_prompt(
                self.engine.tokenizer, self._all(), thinking=self.thinking, effort=self.effort
            )
            for piece in run_prompt(
                self.engine, prompt, options, kept=self.kept, should_stop=should_stop, on_progress=on_progress
            ):
                if piece.channel == "think":
                    answer["reasoning_content"] += piece.text
                elif piece.channel == "response":
                    answer["content"] += piece.text
                yield piece
        finally:
            if answer["content"] or answer["reasoning_content"]:
                self.messages.append(answer)
            else:
                self.messages.pop()

    def undo(self) -> bool:
        """Take back the last message and its answer; says whether there was one."""
        turns = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if turns:
            del self.messages[turns[-1] :]
        return bool(turns)

    def reset(self) -> None:
        """Begin anew, under the same system prompt."""
        self.messages.clear()

    def save(self, path: str | Path) -> None:
        """Write messages, system prompt and the longest kept state of them to one file."""
        session = self.session()
        session.notes = {_NOTE: json.dumps({"system": self.system, "messages": self.messages})}
        session.save(path)

    def load(self, path: str | Path) -> None:
        """Go on from a saved conversation. A session file without messages only saves reading its ids.

        Raises ModelFilesError for a damaged file, UsageError for one of another model.
        """
        session = self.engine.load_session(path)
        system, messages = self.system, []
        if _NOTE in session.notes:
            try:
                noted = json.loads(session.notes[_NOTE])
                system, messages = noted["system"], list(noted["messages"])
                chat_prompt(self.engine.tokenizer, [{"role": "user", "content": "x"}, *messages])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ModelFilesError(f"{path}: its messages are damaged ({error})") from None
        self.system, self.messages = system, messages
        self.kept.keep(session)

    def session(self) -> Session:
        """A session that has read as much of the conversation as is kept."""
        if not self._all():
            return self.engine.session()
        options = {"thinking": self.thinking, "effort": self.effort}
        return self.kept.resume(chat_prompt(self.engine.tokenizer, self._all(), **options).ids)

    def _all(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]
