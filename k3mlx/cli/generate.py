"""`k3mlx generate`: one prompt, one answer, streamed."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .interrupt import interruptible
from .options import (
    add_model_options,
    add_sampling_options,
    check_target,
    faint,
    note,
    open_engine,
    parts_table,
    read_prompt,
    sampling_arguments,
    write_text,
)

if TYPE_CHECKING:
    from k3mlx.engine import Engine
    from k3mlx.generation import Completion, Piece
    from k3mlx.kept import KeptSessions

HELP = "answer one prompt; the answer goes to stdout, thinking and the report to stderr"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", "-p", metavar="TEXT", help="the prompt; - reads standard input")
    parser.add_argument("--system-prompt", metavar="TEXT")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as plain text, without chat format"
    )
    parser.add_argument("--no-thinking", action="store_true", help="ask for the answer at once")
    parser.add_argument(
        "--effort", choices=("low", "high", "max"), help="how much to think (default: not said)"
    )
    parser.add_argument("--hide-thinking", action="store_true", help="let it think, but do not show it")
    parser.add_argument(
        "--json", metavar="FILE", help="write one object with text, ids and report; - is stdout"
    )
    parser.add_argument(
        "--prompt-cache-file",
        metavar="FILE",
        help="do not read again what this file holds of the prompt; what was read is written there",
    )
    add_sampling_options(parser)
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    from k3mlx.errors import UsageError
    from k3mlx.generation import stream_generate

    prompt = read_prompt(args.prompt)
    if not prompt:
        raise UsageError("the prompt is empty: expected some text")
    if args.raw and (args.system_prompt is not None or args.effort or args.no_thinking):
        raise UsageError(
            "--raw continues plain text: --system-prompt, --effort and --no-thinking do not apply"
        )
    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens is {args.max_tokens}, expected at least 1")
    check_target(args.json, "--json")
    check_target(args.prompt_cache_file, "--prompt-cache-file")
    asked: dict[str, Any] = {"prompt": prompt, "raw": True}
    if not args.raw:
        system = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
        messages = [*system, {"role": "user", "content": prompt}]
        asked = {"messages": messages, "thinking": not args.no_thinking, "effort": args.effort}
    with open_engine(args) as engine, interruptible() as interrupted:
        printer = _Printer(quiet=args.json == "-", hide_thinking=args.hide_thinking)
        kept = _read_cache(args.prompt_cache_file, engine)
        pieces = stream_generate(
            engine, **asked, **sampling_arguments(args), kept=kept, should_stop=lambda: bool(interrupted)
        )
        completion = printer.show(pieces)
        if kept is not None:
            kept.resume([*completion.prompt_ids, -1]).save(args.prompt_cache_file)
    if args.verbose:
        note(parts_table(completion.report["parts"]))
    note(report_line(completion))
    if completion.finish_reason == "length" and not (completion.text or args.raw):
        note(f"stopped at --max-tokens {args.max_tokens} before the answer began; give it more")
    if args.json:
        text = json.dumps(completion.as_dict(), ensure_ascii=False) + "\n"
        write_text(args.json, text, "--json")
    return 130 if completion.finish_reason == "cancelled" else 0


def _read_cache(file: str | None, engine: Engine) -> KeptSessions | None:
    """What earlier runs have read, if that is kept in a file; the file need not be there yet."""
    from k3mlx.errors import UsageError
    from k3mlx.kept import KeptSessions

    if file is None:
        return None
    kept = KeptSessions(engine, sys.maxsize)
    if Path(file).exists():
        session = engine.load_session(file)
        if session.notes:
            raise UsageError(f"{file} holds a conversation of k3mlx chat; give another --prompt-cache-file")
        kept.keep(session)
    return kept


class _Printer:
    """Shows pieces as they come: the answer on stdout, thinking (dimmed) and tool calls' frame on stderr."""

    def __init__(self, quiet: bool, hide_thinking: bool) -> None:
        self.quiet = quiet
        self.hide_thinking = hide_thinking
        self.dim = faint(sys.stderr)

    def show(self, pieces: Iterator[Piece]) -> Completion:
        channel, ends_line = "", True
        for piece in pieces:
            if piece.completion is not None:
                self._finish(channel, ends_line)
                return piece.completion
            if self.quiet or (piece.channel == "think" and self.hide_thinking):
                continue
            if channel and channel != piece.channel:
                self._finish(channel, ends_line)
            channel, ends_line = piece.channel, piece.text.endswith("\n")
            self._write(channel, piece.text)
        raise AssertionError("a run ends with a completion")

    def _write(self, channel: str, text: str) -> None:
        if channel == "think":
            before, after = self.dim
            with contextlib.suppress(OSError):  # as a note: what stderr cannot take is no failure
                print(f"{before}{text}{after}", end="", file=sys.stderr, flush=True)
        else:
            print(text, end="", flush=True)

    def _finish(self, channel: str, ends_line: bool) -> None:
        if channel and not ends_line:
            self._write(channel, "\n")


def report_line(completion: Completion) -> str:
    """The run in one line: tokens, rates, where the time went, bytes read, memory."""
    from k3mlx.memory import format_size

    report, seconds = completion.report, completion.report["seconds"]
    prompt, generated = report["prompt_tokens"], report["generated_tokens"]
    parts = (
        f"prompt {prompt} tokens{_rate(prompt, seconds['prefill'])},"
        f" generated {generated} tokens{_rate(report['decode_steps'], seconds['decode'])}",
        f"attention {seconds['attention']:.2f} s, experts {seconds['experts']:.2f} s,"
        f" expert loading {seconds['expert_wait']:.2f} s, head {seconds['head']:.2f} s",
        f"read {report['experts']['bytes_read'] / 1e9:.3g} GB,"
        f" peak memory {format_size(report['peak_memory_bytes'])}",
    )
    return " | ".join(parts)


def _rate(tokens: int, seconds: float) -> str:
    return f" ({tokens / seconds:.3g}/s)" if tokens and seconds > 0 else ""
