"""One line of a diagnosis: a code, how bad it is, what was found and the remedy; and the exit code of them all.

Owns the table of fatal codes. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Figures = Mapping[str, Any]

OK, WARNING, FATAL = "ok", "warning", "fatal"

FAILED, FILES, NO_FIT = 1, 3, 4  # exit codes, as those of errors

EXIT_CODES = {  # of every fatal code
    "python": FAILED,
    "package": FAILED,
    "setting": FAILED,
    "device-setting": FAILED,
    "selftest": FAILED,
    "trial": FAILED,
    "trial-answer": FAILED,
    "model": FILES,
    "file": FILES,
    "config": FILES,
    "census": FILES,
    "overlay": FILES,
    "vocabulary": FILES,
    "vocabulary-ids": FILES,
    "vocabulary-text": FILES,
    "read": FILES,
    "device": NO_FIT,
    "trial-refused": NO_FIT,
    "experts-format": NO_FIT,
    "memory": NO_FIT,
}


@dataclass(frozen=True)
class Finding:
    """One line. `details` are shown when asked for, `data` are figures for programs."""

    code: str
    level: str
    text: str
    remedy: str = ""
    details: tuple[str, ...] = ()
    data: Figures = field(default_factory=dict)


def ok(code: str, text: str, details: Iterable[str] = (), data: Figures | None = None) -> Finding:
    """Nothing to be done."""
    return Finding(code, OK, text, "", tuple(details), data or {})


def warning(
    code: str, text: str, remedy: str, details: Iterable[str] = (), data: Figures | None = None
) -> Finding:
    """It will run, slower or with less than it could have."""
    return Finding(code, WARNING, text, remedy, tuple(details), data or {})


def fatal(
    code: str, text: str, remedy: str, details: Iterable[str] = (), data: Figures | None = None
) -> Finding:
    """It will not run. `code` is one of EXIT_CODES."""
    assert code in EXIT_CODES, code
    return Finding(code, FATAL, text, remedy, tuple(details), data or {})


def exit_code(findings: Sequence[Finding]) -> int:
    """0 without a fatal finding, else 3 for model files before 4 for what does not fit before 1."""
    codes = {EXIT_CODES[finding.code] for finding in findings if finding.level == FATAL}
    return next((code for code in (FILES, NO_FIT, FAILED) if code in codes), 0)
