"""`k3mlx chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .interrupt import interruptible
from .options import add_model_options, add_sampling_options, check_target, open_engine
from .terminal import LineReader, StatusLine, dim

if TYPE_CHECKING:
    from k3mlx.conversation import Conversation
    from k3mlx.engine import Engine
    from k3mlx.generation import Completion, RunOptions

HELP = "talk to the model in the terminal; /help there lists what can be typed"

COMMANDS = """\
/help              this
/system [TEXT]     show the system prompt, or set it (- removes it)
/undo              take back the last message and its answer
/reset             begin anew
/save FILE         write the conversation with its state
/load FILE         go on from there
/stats             what has been done since start
/exit              leave, as Ctrl-D does
A line ending in \\ goes on in the next; \"\"\" begins and ends a block of lines. Ctrl-C stops an answer."""

STATUS_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-prompt", metavar="TEXT")
    parser.add_argument("--no-thinking", action="store_true", help="ask for the answer at once")
    parser.add_argument(
        "--effort", choices=("low", "high", "max"), help="how much to think (default: not said)"
    )
    parser.add_argument("--hide-thinking", action="store_true", help="let it think, but do not show it")
    parser.add_argument(
        "--prompt-cache-file",
        metavar="FILE",
        help="go on from this file if it is there, and write it at the end",
    )
    parser.add_argument(
        "--session-memory",
        default="auto",
        metavar="SIZE",
        help="state of earlier points kept (default: a part of memory, at most 4GB)",
    )
    parser.add_argument(
        "--history", default="~/.k3mlx_history", metavar="FILE", help="of typed lines; none keeps none"
    )
    add_sampling_options(parser)
    parser.set_defaults(max_tokens=4096)
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    from k3mlx.conversation import Conversation
    from k3mlx.generation import RunOptions, sampling_options
    from k3mlx.kept import KeptSessions, session_memory

    check_target(args.prompt_cache_file, "--prompt-cache-file")
    memory = session_memory(args.session_memory, args.memory)
    with open_engine(args, memory) as engine:
        names = ("temp", "top_p", "top_k", "min_p", "seed")
        sampling = sampling_options(engine, {name: getattr(args, name) for name in names})
        options = RunOptions(sampling, args.max_tokens)
        conversation = Conversation(
            engine,
            KeptSessions(engine, memory),
            system=args.system_prompt,
            thinking=not args.no_thinking,
            effort=args.effort,
        )
        reader = LineReader(None if args.history == "none" else Path(args.history).expanduser())
        chat = _Chat(conversation, options, reader, hide_thinking=args.hide_thinking)
        if args.prompt_cache_file and Path(args.prompt_cache_file).exists():
            chat.load(args.prompt_cache_file)
        try:
            return chat.run()
        finally:
            reader.save_history()
            if args.prompt_cache_file and conversation.messages:
                conversation.save(args.prompt_cache_file)


class _Chat:
    """The loop of messages and commands."""

    def __init__(
        self, conversation: Conversation, options: RunOptions, reader: LineReader, *, hide_thinking: bool
    ) -> None:
        self.conversation = conversation
        self.options = options
        self.reader = reader
        self.hide_thinking = hide_thinking
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(COMMANDS),
            "/system": self.system,
            "/undo": self.undo,
            "/reset": self.reset,
            "/save": self.save,
            "/load": self.load,
            "/stats": self.stats,
        }

    def run(self) -> int:
        """Until /exit, the end of input, or Ctrl-C twice in a row."""
        from k3mlx.errors import K3Error

        interrupted = False
        while True:
            try:
                text = self.reader.read("> " if sys.stdin.isatty() else "")
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                if interrupted:
                    print()
                    return 130
                interrupted = True
                print(dim("\nonce more, or /exit, to leave"))
                continue
            interrupted = False
            name, _, rest = text.partition(" ")
            if name == "/exit":
                return 0
            try:
                if name in self.commands:
                    self.commands[name](rest.strip())
                elif name.startswith("/") and name[1:].isalpha():
                    print(dim(f"{name} is no command; /help lists them"))
                elif text:
                    self.answer(text)
            except K3Error as error:
                print(dim(f"error: {error}"))
            except OSError as error:
                print(dim(f"error: {error.filename or rest}: {error.strerror}"))

    def answer(self, text: str) -> None:
        """Ask, and show the answer as it comes. Ctrl-C stops it between layers, once more at once."""
        done: Completion | None = None
        channel, ends_line = "", True
        status = _Status(self.conversation.engine)
        with interruptible() as interrupted, status.line.shown():
            pieces = self.conversation.ask(text, self.options, lambda: bool(interrupted), status.reading)
            try:
                for piece in pieces:
                    done = piece.completion
                    status.writing()
                    if not piece.text or (piece.channel == "think" and self.hide_thinking):
                        continue
                    if channel and channel != piece.channel:
                        print("" if ends_line else "\n")
                        status.line.written("\n")
                    channel, ends_line = piece.channel, piece.text.endswith("\n")
                    print(dim(piece.text) if channel == "think" else piece.text, end="", flush=True)
                    status.line.written(piece.text)
            except KeyboardInterrupt:
                pieces.close()
        if not ends_line:
            print()
        print(dim(self.remark(done)))

    def remark(self, done: Completion | None) -> str:
        """The answer in one line."""
        if done is None or not done.ids:
            return "stopped before an answer began; the message is not kept"
        report, seconds = done.report, done.report["seconds"]
        read = len(done.prompt_ids) - done.cached_tokens
        ends = {
            "cancelled": "stopped; ",
            "length": f"cut at {len(done.ids)} tokens (--max-tokens); ",
            "stop": "",
        }
        return (
            f"{ends[done.finish_reason]}read {read} of {len(done.prompt_ids)} tokens"
            f"{_rate(read, seconds['prefill'])}, wrote {len(done.ids)}"
            f"{_rate(report['decode_steps'], seconds['decode'])}{_hits(report['experts'])}"
        )

    def system(self, text: str) -> None:
        if not text:
            print(self.conversation.system or dim("there is no system prompt"))
            return
        self.conversation.system = None if text == "-" else text
        print(dim("the next message is answered under it"))

    def undo(self, _: str) -> None:
        taken = self.conversation.undo()
        print(dim("taken back" if taken else "there is nothing to take back"))

    def reset(self, _: str) -> None:
        self.conversation.reset()
        print(dim("a new conversation"))

    def save(self, path: str) -> None:
        if not path:
            print(dim("/save needs the name of a file"))
            return
        self.conversation.save(_file(path))
        print(dim(f"saved to {path}"))

    def load(self, path: str) -> None:
        if not path:
            print(dim("/load needs the name of a file"))
            return
        self.conversation.load(_file(path))
        print(dim(f"{len(self.conversation.messages)} messages from {path}"))

    def stats(self, _: str) -> None:
        from k3mlx.memory import format_size

        conversation = self.conversation
        report, kept = conversation.engine.report(), conversation.kept
        seconds = report["seconds"]
        print(
            f"read {report['prompt_tokens']} tokens{_rate(report['prompt_tokens'], seconds['prefill'])}, wrote"
            f" {report['generated_tokens']}{_rate(report['decode_steps'], seconds['decode'])}"
            f"{_hits(report['experts'])}\n"
            f"experts read: {format_size(report['experts']['bytes_read'])}; kept: {len(kept)} points,"
            f" {format_size(kept.used[0])}; peak memory: {format_size(report['peak_memory_bytes'])}"
        )


def _file(path: str) -> Path:
    """A path that a person typed, `~` expanded."""
    from k3mlx.errors import UsageError

    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: nobody's home folder; give the path in full") from None


class _Status:
    """What the live line says."""

    def __init__(self, engine: Engine) -> None:
        self.line = StatusLine()
        self._engine = engine
        self._started = self._last = time.monotonic()
        self._before = engine.report()
        self._first: float | None = None

    def reading(self, fed: int, total: int) -> None:
        self.line.show(f"reading {fed} of {total} tokens")

    def writing(self) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        if now - self._last < STATUS_SECONDS:
            return
        self._last = now
        report = self._engine.report()
        tokens = report["decode_steps"] - self._before["decode_steps"]
        experts = {
            name: report["experts"][name] - self._before["experts"][name] for name in ("hits", "misses")
        }
        seconds = report["seconds"]["decode"] - self._before["seconds"]["decode"]
        self.line.show(f"{tokens} tokens{_rate(tokens, seconds)}{_hits(experts)}")


def _rate(tokens: int, seconds: float) -> str:
    return f" ({tokens / seconds:.3g}/s)" if tokens > 0 and seconds > 0 else ""


def _hits(experts: dict[str, Any]) -> str:
    asked = experts["hits"] + experts["misses"]
    return f", {100 * experts['hits'] / asked:.0f} % of experts found in memory" if asked else ""
