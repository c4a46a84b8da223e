"""Which backend and device a run uses: what was asked for, what is there, and one line where they differ.

Owns the meaning of `--backend`, `--device` and `K3_METAL`, and the import of mlx with `MLX_ENABLE_TF32=0`
set before it. Imports mlx only where the answer depends on it. Loads no model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .errors import ResourceError, UsageError

BACKENDS = ("auto", "mlx", "numpy")
DEVICES = ("auto", "gpu", "cpu")
MLX_FROM, MLX_BELOW = (0, 32, 4), (0, 33)
TF32 = "MLX_ENABLE_TF32"


@dataclass(frozen=True)
class Choice:
    """backend: `mlx` or `numpy`. device: `metal`, `cuda` or `cpu`. notes: lines for the person at the terminal.

    kernels: whether the kernels of this package may be used on the device; False on the CPU. must: they were asked
    for, so that one that fails its self-test is an error.
    """

    backend: str
    device: str
    kernels: bool = False
    notes: tuple[str, ...] = ()
    must: bool = False


def choose(backend: str = "auto", device: str = "auto", environ: Mapping[str, str] | None = None) -> Choice:
    """Backend and device for a run; `environ` is `os.environ` unless given.

    Raises UsageError for values that mean nothing, ResourceError for what was asked for and is not there.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend is {backend!r}, expected {', '.join(BACKENDS)}")
    if device not in DEVICES:
        raise UsageError(f"device is {device!r}, expected {', '.join(DEVICES)}")
    wanted, why = _wanted(device, os.environ if environ is None else environ)
    if backend == "numpy":
        if wanted in ("gpu", "metal"):
            raise ResourceError(
                f"{why} asks for a GPU, but the numpy backend runs on the CPU: use --backend mlx"
            )
        return Choice("numpy", "cpu")
    if backend == "auto" and wanted == "cpu":
        return Choice("numpy", "cpu", notes=(f"{why}: no GPU is used; numpy on the CPU",))
    try:
        mx = import_mlx()
    except ResourceError as error:
        if backend == "mlx" or wanted in ("gpu", "metal"):
            raise ResourceError(f"{why}: {error}" if wanted in ("gpu", "metal") else str(error)) from None
        reason = f"{error}" if find_spec("mlx") else "mlx is not installed"
        return Choice("numpy", "cpu", notes=(f"{reason}: numpy on the CPU",))
    if wanted == "cpu":
        return Choice("mlx", "cpu", notes=_version_notes(mx))
    return _on_gpu(mx, backend, wanted, why)


def _wanted(device: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """(`cpu`, `gpu`, `metal` or `auto`, the option that says so); the flag overrides K3_METAL."""
    if device != "auto":
        return device, f"--device {device}"
    value = environ.get("K3_METAL", "")
    if value not in ("", "0", "1"):
        raise UsageError(f"K3_METAL is {value!r}, expected 0, 1 or nothing")
    return {"": "auto", "0": "cpu", "1": "metal"}[value], f"K3_METAL={value}"


def _on_gpu(mx: Any, backend: str, wanted: str, why: str) -> Choice:
    kind = gpu_kind(mx)
    if wanted == "metal" and kind != "metal":
        there = "; CUDA is here, --device gpu uses it" if kind else ""
        raise ResourceError(f"{why} asks for Metal, but mlx {mx.__version__} has no Metal device here{there}")
    if wanted == "gpu" and kind is None:
        raise ResourceError(f"{why}, but mlx {mx.__version__} has neither a Metal nor a CUDA device here")
    notes = _version_notes(mx)
    if kind is None:
        instead = "numpy" if backend == "auto" else "mlx"
        line = f"no Metal or CUDA device: {instead} on the CPU"
        return Choice(instead, "cpu", notes=(*notes, line))
    return Choice("mlx", kind, kernels=True, notes=notes, must=wanted == "metal")


def gpu_kind(mx: Any) -> str | None:
    """`metal` or `cuda`, whichever this mlx has a device for."""
    if mx.metal.is_available():
        return "metal"
    return "cuda" if hasattr(mx, "cuda") and mx.cuda.is_available() else None


def import_mlx() -> Any:
    """`mlx.core`, imported with 10-bit products off. Raises ResourceError when it is absent or too old."""
    os.environ.setdefault(TF32, "0")
    try:
        mx: Any = import_module("mlx.core")
    except ImportError as error:
        raise ResourceError(
            f"mlx cannot be imported ({error}); on Linux: pip install 'mlx[cpu]', or 'mlx[cuda13]' for a GPU"
        ) from None
    if version_of(mx) < MLX_FROM:
        raise ResourceError(
            f"mlx is {mx.__version__}, expected at least {_dotted(MLX_FROM)}: pip install -U mlx"
        )
    return mx


def version_of(mx: Any) -> tuple[int, ...]:
    """The numbers of mlx's version: (0, 32, 4), whatever follows them."""
    numbers = []
    for field in mx.__version__.split("+")[0].split(".")[:3]:
        digits = "".join(c for c in field if c.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)


def _version_notes(mx: Any) -> tuple[str, ...]:
    notes = []
    if version_of(mx) >= MLX_BELOW:
        notes.append(
            f"mlx is {mx.__version__}; this package was made for versions below {_dotted(MLX_BELOW)}"
        )
    if os.environ.get(TF32) != "0":
        notes.append(f"{TF32}={os.environ[TF32]}: float32 products may have 10-bit mantissas on this GPU")
    return tuple(notes)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
