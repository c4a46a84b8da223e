"""Flags that several commands share, and what they turn into. Names follow mlx_lm where it has one."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from k3mlx.errors import K3Error, UsageError

from .progress import PromptProgress

if TYPE_CHECKING:
    from k3mlx.engine import Engine


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, how it runs, and in how much memory."""
    group = add_run_options(parser)
    group.add_argument(
        "--prefill-step-size",
        default="auto",
        metavar="N",
        help="prompt tokens per pass (default: the largest of 1, 16, 64, ... that memory allows)",
    )
    group.add_argument(
        "--dense-parallel",
        action="store_true",
        help="under mlx.launch: split heads, MLP widths and the output head over the ranks too, not only experts",
    )
    add_streaming_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Which model, and what computes it."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", help="folder or repo id in the local cache (default: the small K3 in the package)"
    )
    group.add_argument(
        "--backend",
        choices=("auto", "mlx", "numpy"),
        default="auto",
        help="auto: mlx where it has a GPU, else numpy",
    )
    group.add_argument(
        "--device",
        choices=("auto", "gpu", "cpu"),
        default="auto",
        help="gpu is Metal or CUDA; auto: as K3_METAL=0|1 says, else a GPU if there is one",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float64"),
        help="what is computed in: float32 or float64 on numpy, bfloat16 or float32 on mlx"
        " (default: bfloat16 on a GPU, else float32)",
    )
    group.add_argument(
        "--experts-device", choices=("cpu", "gpu"), default="cpu", help="where routed experts compute (mlx)"
    )
    group.add_argument(
        "--experts-kernel",
        choices=("auto", "native", "numpy", "stream"),
        default="auto",
        help="on the CPU: native (C), or numpy on the numpy backend and stream (CPU streams) on mlx"
        " (default: native where built and verified)",
    )
    group.add_argument(
        "--dense-kernel",
        choices=("auto", "native", "numpy"),
        default="auto",
        help="numpy backend: C on dense weights as stored, or numpy on widened ones (default: C, but for small models)",
    )
    group.add_argument(
        "--cpu-threads",
        type=int,
        metavar="N",
        help="threads for CPU kernels (default: OMP_NUM_THREADS, else cores)",
    )
    return group


def add_streaming_options(parser: argparse.ArgumentParser) -> None:
    """Where the memory goes and how experts are read. None of these changes a result."""
    group = parser.add_argument_group(
        "memory and experts (none of these changes a result, but --memory chooses --prefill-step-size auto)"
    )
    group.add_argument(
        "--memory",
        default="auto",
        metavar="SIZE",
        help="of the whole process, e.g. 64GB (default: what there is)",
    )
    group.add_argument(
        "--expert-cache",
        default="auto",
        metavar="SIZE",
        help="expert bytes kept in memory, e.g. 40GB (default: K3_EXPERT_GB, else what --memory has left)",
    )
    group.add_argument("--cache-policy", choices=("lru", "decayed", "s3fifo"), help="what is dropped first")
    group.add_argument(
        "--io-threads", type=int, metavar="N", help="reads at once (default: K3_LOAD_THREADS, else 4)"
    )
    group.add_argument(
        "--direct-io",
        choices=("auto", "on", "off"),
        help="read past the page cache (default: K3_DIRECT=0|1, else as a probe of the disk says)",
    )
    group.add_argument(
        "--pipe", choices=("on", "off"), help="read while computing (default: K3_PIPE=0|1, else on)"
    )
    group.add_argument(
        "--lookahead",
        metavar="auto|off|N",
        help="experts of the next layer to read on a guess (default: off)",
    )
    group.add_argument(
        "--warm-start",
        choices=("auto", "on", "off"),
        help="read at first what was in memory last time (default: auto, for large models)",
    )
    group.add_argument("--expert-trace", metavar="FILE", help="write what the routers choose to a file")
    group.add_argument(
        "--model-dirs",
        nargs="+",
        default=(),
        metavar="DIR",
        help="folders on other drives with more of the shards, or with copies of them",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn; unset values are the model's own, else temp 1.0 and top-p 0.95."""
    group = parser.add_argument_group("sampling (default: the model's own, else temp 1.0, top-p 0.95)")
    group.add_argument("--max-tokens", "-m", type=int, default=512, metavar="N", help="default: 512")
    group.add_argument("--temp", type=float, help="0 is greedy")
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int, help="0 is all")
    group.add_argument("--min-p", type=float)
    group.add_argument("--seed", type=int)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `load` from the flags of `add_model_options`."""
    names = (
        "backend", "device", "dtype", "experts_device", "experts_kernel", "dense_kernel", "cpu_threads", "memory",
        "expert_cache", "cache_policy", "io_threads", "direct_io", "pipe", "lookahead", "warm_start", "expert_trace",
        "model_dirs", "prefill_step_size", "dense_parallel",
    )  # fmt: skip
    return {name: getattr(args, name) for name in names}


def open_engine(args: argparse.Namespace, session_memory: int = 0, text: bool = True) -> Engine:
    """Load the model that the flags name, and say on stderr what it runs on.

    session_memory: bytes to set aside for sessions that the command keeps. text: the command needs the vocabulary.
    """
    from k3mlx.engine import load

    engine = load(args.model, **engine_arguments(args), session_memory=session_memory)
    engine.on_layer = PromptProgress()
    try:
        _say_what_runs(engine, args.verbose, engine.tokenizer.warnings if text else ())
    except BaseException:
        engine.close()
        raise
    return engine


def _say_what_runs(engine: Engine, verbose: bool, warnings: Sequence[str]) -> None:
    for line in (*engine.backend.notes, *warnings):
        note(f"k3mlx: {line}")
    parts = engine.backend.parts_report()
    experts = next(part["format"] for part in parts if part["part"] == "experts")
    config = engine.config
    note(
        f"{engine.folder.name}: {config.num_hidden_layers} layers, {config.num_experts} experts ({experts}),"
        f" {engine.backend.name} {engine.backend.dtype} on {engine.backend.device}"
    )
    plan = engine.governor.plan
    for line in plan.lines() if verbose or plan.dense_bytes_per_pass else ():
        note(f"k3mlx: {line}")
    if verbose:
        note(parts_table(parts))


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `stream_generate` from the sampling flags."""
    return {name: getattr(args, name) for name in ("max_tokens", "temp", "top_p", "top_k", "min_p", "seed")}


def read_prompt(prompt: str | None) -> str:
    """The prompt of `--prompt`, or of standard input for `-` and for none when input is not a terminal.

    Raises UsageError for no prompt or for bytes that are not UTF-8.
    """
    if prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt TEXT, or pipe text in")
    if prompt is not None and prompt != "-":
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UsageError("--prompt is not valid UTF-8; give it in UTF-8, or pipe the text in")
        return prompt
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8: byte 0x{data[error.start]:02X} at offset {error.start};"
            " convert it first"
        ) from None


def parts_table(parts: list[dict[str, Any]]) -> str:
    """What runs where, a line a part."""
    columns = ("part", "device", "kernel", "format", "calls", "failures", "fallbacks")
    rows = [columns, *(tuple(str(part[column]) for column in columns) for part in parts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def note(text: str) -> None:
    """A line for the person at the terminal; never part of a command's output, and never its failure."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def faint(stream: TextIO) -> tuple[str, str]:
    """What begins and ends faint text on a stream: nothing where that cannot be shown or is not wanted."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return ("", "") if plain or not stream.isatty() else ("\x1b[2m", "\x1b[22m")


def check_target(path: str | None, option: str) -> None:
    """Raise UsageError now for a file that could not be written when the work is done. `-` is stdout."""
    if path is None or path == "-":
        return
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise UsageError(f"{option} {path}: cannot be written; expected a file in a folder that exists")


def write_text(path: str, text: str, option: str) -> None:
    """Write a file that an option names, or stdout for `-`. Raises K3Error."""
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise K3Error(f"{option} {path}: cannot be written ({error.strerror})") from None
