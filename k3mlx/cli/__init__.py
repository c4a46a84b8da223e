"""The `k3mlx` command: finds the subcommand, turns errors into one or two lines and an exit code.

A file per subcommand, each with HELP, `add_arguments(parser)` and `run(args)`. Nothing heavy is imported
until a command runs, so help is quick. Exit codes: 0 done, 1 failed, 2 usage, 3 model files, 4 does not
fit or device absent, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from k3mlx import __version__
from k3mlx.errors import K3Error

from .options import note

COMMANDS = (
    "generate",
    "chat",
    "serve",
    "plan",
    "download",
    "convert",
    "doctor",
    "selftest",
    "validate",
    "perplexity",
    "bench",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    _open_missing_streams()
    args = _parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = int(_follow(args) if _follows(args) else args.run(args))
        sys.stdout.flush()
    except K3Error as error:
        code = _failed(str(error), error.exit_code, args.verbose)
        if error.advice:
            note(f"k3mlx: {error.advice}")
        return code
    except KeyboardInterrupt:
        note("k3mlx: interrupted")
        return 130
    except BrokenPipeError:
        _abandon_stdout()
        return _failed("the reader of our output has gone", 1, args.verbose)
    except OSError as error:
        _abandon_stdout()
        where = f"{error.filename}: " if error.filename else ""
        return _failed(f"{where}{error.strerror or error}", 1, args.verbose)
    except MemoryError:
        return _failed("out of memory: the dense weights and this prompt do not fit", 4, args.verbose)
    return code


def _follows(args: argparse.Namespace) -> bool:
    """Whether this process was started to serve rank 0's experts, and the command is one that has any."""
    from k3mlx.ranks.launch import launched_rank

    return bool(launched_rank()) and hasattr(args, "expert_trace")


def _follow(args: argparse.Namespace) -> int:
    """Serve rank 0 with the same flags. Prints nothing but errors."""
    from k3mlx.engine import load

    from .options import engine_arguments

    try:
        load(args.model, **engine_arguments(args))
    except SystemExit as done:
        return int(done.code or 0)
    raise AssertionError("load does not return on a rank beyond 0")


def _failed(message: str, code: int, verbose: bool) -> int:
    """Say what went wrong, with the traceback if asked, and return the exit code."""
    if verbose:
        note(traceback.format_exc().rstrip())
    note(f"k3mlx: error: {message}")
    return code


def _open_missing_streams() -> None:
    """A process may be started with streams closed; what goes to one of them goes nowhere."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 (open as long as the process)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="k3mlx", description="Run Kimi K3 from the checkpoint as released.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"k3mlx {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = import_module(f".{name}", __name__)
        sub = commands.add_parser(name, help=command.HELP, description=command.HELP, allow_abbrev=False)
        command.add_arguments(sub)
        sub.add_argument("--verbose", action="store_true", help="what runs where, and tracebacks of errors")
        sub.set_defaults(run=command.run)
    return parser


def _abandon_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's own flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):  # not every stream has a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
