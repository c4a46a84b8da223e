"""The terminal of a chat: reading messages, a live line at the bottom, dimmed text.

Owns escape sequences and line editing. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from .options import faint

HISTORY_LINES = 1000
BLOCK = '"""'


def dim(text: str) -> str:
    """Text for a remark, where the terminal can show that."""
    before, after = faint(sys.stdout)
    return f"{before}{text}{after}"


class LineReader:
    """Messages typed by a person: history, lines joined by a backslash or between triple quotes.

    With GNU readline a paste of several lines is one message.
    """

    def __init__(self, history: Path | None) -> None:
        self._history = history if sys.stdin.isatty() else None
        try:
            import readline
        except ImportError:  # Windows
            self._readline = None
        else:
            self._readline = readline
            if "libedit" not in (readline.__doc__ or ""):
                readline.parse_and_bind("set enable-bracketed-paste on")
            readline.set_history_length(HISTORY_LINES)
            if self._history is not None:
                with contextlib.suppress(OSError):
                    readline.read_history_file(self._history)

    def read(self, prompt: str) -> str:
        """The next message, outer white space removed. Raises EOFError at the end of input."""
        line = self._line(prompt)
        if line.lstrip().startswith(BLOCK):
            return self._block(line.lstrip()[len(BLOCK) :])
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line("… "))
        return "\n".join(lines).strip()

    def save_history(self) -> None:
        """Keep what was typed for the next chat, readable by its owner only."""
        if self._readline is None or self._history is None:
            return
        with contextlib.suppress(OSError):
            self._history.touch(mode=0o600)
            self._readline.write_history_file(self._history)

    def _block(self, first: str) -> str:
        lines = [first]
        while BLOCK not in lines[-1]:
            lines.append(self._line("… "))
        lines[-1] = lines[-1].partition(BLOCK)[0]
        return "\n".join(lines).strip()

    @staticmethod
    def _line(prompt: str) -> str:
        if sys.stdin.isatty():
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class StatusLine:
    """A line at the bottom of the screen that changes while text scrolls above it.

    It is told what is written, because a cursor behind the last column cannot be left and found again
    everywhere: the next character would overwrite the last one.
    """

    def __init__(self) -> None:
        self._rows = 0  # of the terminal, 0 while there is no line
        self._columns = 0
        self._column = 0  # of the cursor

    @contextlib.contextmanager
    def shown(self) -> Iterator[StatusLine]:
        """Reserve the bottom row; does nothing where that cannot be done."""
        usable = sys.stdout.isatty() and os.name != "nt" and os.environ.get("TERM", "dumb") != "dumb"
        columns, rows = shutil.get_terminal_size() if usable else (0, 0)
        if rows >= 5:
            self._columns, self._rows, self._column = columns, rows, 0
            self._out(f"\n\x1b[A\x1b7\x1b[1;{rows - 1}r\x1b8")  # a free row below, then text stays above it
        try:
            yield self
        finally:
            if self._rows:
                self._out(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
                self._rows = 0

    def written(self, text: str) -> None:
        """Text has been written; escape sequences are none of it."""
        for character in text:
            if character in "\n\r":
                self._column = 0
                continue
            width = _width(character)
            wraps = self._column + width > self._columns
            self._column = width if wraps else self._column + width

    def show(self, text: str) -> None:
        if self._rows and self._column < self._columns:
            shown = text[: self._columns - 1]
            self._out(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[2m{shown}\x1b[22m\x1b8")

    @staticmethod
    def _out(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _width(character: str) -> int:
    """Columns that a character takes; tabs are taken for one."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
