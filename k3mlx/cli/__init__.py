"""The `k3mlx` command: finds the subcommand, turns errors into one or two lines and an exit code.

A file per subcommand, each with HELP, `add_arguments(parser)` and `run(args)`. Nothing heavy is imported
until a command runs, so help is quick. Exit codes: 0 done, 1 failed, 2 usage, 3 model files, 4 does not
fit or device absent, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from k3mlx import __version__
from k3mlx.errors import K3Error

COMMANDS = ("generate", "chat", "serve", "selftest")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    args = _parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
    except K3Error as error:
        if args.verbose:
            raise
        print(f"k3mlx: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("k3mlx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _abandon_stdout()
        print("k3mlx: error: the reader of our output has gone", file=sys.stderr)
        return 1
    except MemoryError:
        print("k3mlx: error: out of memory: the dense weights and this prompt do not fit", file=sys.stderr)
        return 4
    return int(code)


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
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
