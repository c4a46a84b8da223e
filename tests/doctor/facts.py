"""Machines, packages and models that are made up, each in good order; tests replace what they are about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from k3mlx.doctor.kernels import CpuKernels
from k3mlx.doctor.outputs import Process
from k3mlx.doctor.packages import Package
from k3mlx.doctor.system import System
from k3mlx.doctor.trial import ANSWER, Trial
from k3mlx.machine import Available
from k3mlx.selftest import Report, Row
from tests.needs import MB
from tests.text import BYTES, vocabulary_file
from tests.tiny import random_config, write_random_model

GB = 10**9

LINUX = System(
    python=(3, 12, 3),
    implementation="CPython",
    bits=64,
    platform="linux",
    name="Debian GNU/Linux 12",
    architecture="x86_64",
    chip="a processor",
    cores=8,
    memory=Available(50 * GB, 64 * GB, "MemAvailable"),
    swap=(8 * GB, GB),
    processes=(Process(7, "small", 10 * MB),),
)
MAC = replace(
    LINUX, platform="darwin", name="macOS 15.3", architecture="arm64", chip="Apple M4 Max", cores=14,
    performance=10, macos=(15, 3), swap=(2 * GB, 0), wired_limit=0,
)  # fmt: skip

NUMPY = Package("numpy", ">=1.26", "2.1.0", True)
MLX = Package("mlx", ">=0.32.4,<0.33", "0.32.4", True)
C_KERNELS = CpuKernels("C kernels, avx2, 8 threads", ("avx2", "portable"), 23)

PART = {
    "part": "kda", "device": "cpu", "kernel": "numpy", "format": "float32", "calls": 9, "failures": 0, "fallbacks": 0,
}  # fmt: skip
TRIAL = Trial(0, "", ANSWER, (), {"backend": "numpy", "device": "cpu", "dtype": "float32", "parts": [PART]})


def selftest_report(device: str, *failed: tuple[str, str]) -> Report:
    """A report on `device` with two passed checks and these (kernel, path) failed."""
    rows = [row("kda_step", device), row("kda_chunk", "numpy")]
    return Report(device, rows + [row(kernel, path, False) for kernel, path in failed], {"kda_step": 256})


def row(kernel: str, path: str, passed: bool = True) -> Row:
    return Row(kernel, "plain", "float32", path, "relative L2", 1e-7 if passed else 1.0, 2e-6, 0.0, passed)


def write_model(folder: Path, shards: int = 3, **fields: Any) -> Path:
    """A small random model in good order, with a vocabulary of single bytes that fits its configuration."""
    rng = np.random.default_rng(3)
    chosen = {"vocab_size": 512, "num_hidden_layers": 3, "num_experts": 5}
    ids = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 511}  # special ids begin at 256
    config = random_config(rng, **{**chosen, **ids, **fields})
    write_random_model(folder, config, rng, shards=shards)
    (folder / "tiktoken.model").write_bytes(vocabulary_file(BYTES))
    return folder
