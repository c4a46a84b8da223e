"""Work in a process of its own that says what it is doing, so that a hang is told from work that takes long."""

from __future__ import annotations

import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence


class NoAnswerError(Exception):
    """The process hung or died; the message says which, and at what."""


def last_line(command: Sequence[str], silence: float) -> str:
    """The last line that a process prints. Every line is a sign of life: `silence` seconds without one end it.

    Raises NoAnswerError, naming the line before the silence, or the status and the last line of its errors.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    last = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
        ) as process:
            threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
            try:
                while (line := lines.get(timeout=silence)) is not None:
                    last = line.rstrip("\n")
                process.wait(silence)
            except (queue.Empty, subprocess.TimeoutExpired):
                process.kill()
                raise NoAnswerError(f"no answer after {silence:g} s{f' at {last}' if last else ''}") from None
            except BaseException:
                process.kill()
                raise
        if process.returncode == 0:
            return last
        errors.seek(0)
        said = errors.read().strip().splitlines()[-1:] or ["it said nothing"]
        raise NoAnswerError(f"its process ended with status {process.returncode}: {said[0]}")


def _pump(stream: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
