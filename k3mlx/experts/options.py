"""How experts are streamed: the options of `load` and the environment variables behind them.

Owns names, defaults and checks. None of these changes a result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3mlx.errors import UsageError

from .policies import DEFAULT_POLICY, POLICIES

IO_THREADS = 4
IO_THREADS_MAX = 64
DIRECT = ("auto", "on", "off")


@dataclass(frozen=True)
class StreamOptions:
    """How experts are read and kept."""

    io_threads: int = IO_THREADS
    direct_io: str = "auto"  # auto: as a probe of the disk says
    pipe: bool = True  # reading goes on while experts are computed
    lookahead: str = "off"  # auto, off, or how many experts of the next layer to read ahead
    policy: str = DEFAULT_POLICY
    warm_start: str = "off"  # auto: for models that take a while to read
    expert_trace: Path | None = None  # a file to write the routing to
    model_dirs: tuple[Path, ...] = ()  # folders with shards, or copies of them, beside the model's own


def stream_options(
    io_threads: int | None = None,
    direct_io: str | bool | None = None,
    pipe: str | bool | None = None,
    lookahead: str | int | None = None,
    policy: str | None = None,
    warm_start: str | bool | None = None,
    expert_trace: str | Path | None = None,
    model_dirs: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
) -> StreamOptions:
    """Options as given, else as the environment has them, else the defaults. Raises UsageError.

    K3_LOAD_THREADS, K3_DIRECT=0|1 and K3_PIPE=0|1 are read where the option is None.
    """
    environment = os.environ if environment is None else environment
    threads = _threads(io_threads, environment)
    direct = _switch(direct_io, "direct_io", DIRECT, environment, "K3_DIRECT") or "auto"
    piped = _switch(pipe, "pipe", ("on", "off"), environment, "K3_PIPE") or "on"
    ahead = "off" if lookahead is None else str(lookahead)
    if ahead not in ("auto", "off") and not ahead.isdecimal():
        raise UsageError(f"lookahead is {lookahead!r}, expected auto, off or a number of experts")
    if policy is not None and policy not in POLICIES:
        raise UsageError(f"cache policy is {policy!r}, expected one of {', '.join(POLICIES)}")
    return StreamOptions(
        io_threads=threads,
        direct_io=direct,
        pipe=piped == "on",
        lookahead="off" if ahead == "0" else ahead,
        policy=policy or DEFAULT_POLICY,
        warm_start=_switch(warm_start, "warm_start", DIRECT, environment, "") or "auto",
        expert_trace=None if expert_trace is None else Path(expert_trace),
        model_dirs=_folders(model_dirs),
    )


def _folders(folders: Sequence[str | Path]) -> tuple[Path, ...]:
    for folder in folders:
        if not Path(folder).is_dir():
            raise UsageError(f"model_dirs: {folder} is not a folder")
    return tuple(map(Path, folders))


def expert_cache_from_environment(environment: Mapping[str, str] | None = None) -> int | None:
    """Bytes of K3_EXPERT_GB (a number of 10^9 bytes), or None when it is not set. Raises UsageError."""
    text = (os.environ if environment is None else environment).get("K3_EXPERT_GB")
    if not text:
        return None
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < 1e9:
        raise UsageError(f"K3_EXPERT_GB is {text!r}, expected a number of gigabytes")
    return int(size * 10**9)


def _threads(given: int | None, environment: Mapping[str, str]) -> int:
    name, value = "io_threads", given
    if value is None:
        text = environment.get("K3_LOAD_THREADS")
        if not text:
            return IO_THREADS
        name, value = "K3_LOAD_THREADS", int(text) if text.isdecimal() else 0
        if not value:
            raise UsageError(f"{name} is {text!r}, expected a number from 1 to {IO_THREADS_MAX}")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= IO_THREADS_MAX:
        raise UsageError(f"{name} is {value!r}, expected a number from 1 to {IO_THREADS_MAX}")
    return value


def _switch(
    given: str | bool | None,
    name: str,
    choices: tuple[str, ...],
    environment: Mapping[str, str],
    variable: str,
) -> str | None:
    if given is None:
        text = environment.get(variable) if variable else None
        if not text:
            return None
        if text not in ("0", "1"):
            raise UsageError(f"{variable} is {text!r}, expected 0 or 1")
        return "on" if text == "1" else "off"
    if isinstance(given, bool):
        return "on" if given else "off"
    if given not in choices:
        raise UsageError(f"{name} is {given!r}, expected {', '.join(choices[:-1])} or {choices[-1]}")
    return given
