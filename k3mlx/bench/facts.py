"""What a figure depends on beside the program: machine, versions, the model and what it runs on.

Looks these up; measures nothing.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from k3mlx import __version__
from k3mlx.devices import import_mlx
from k3mlx.doctor.system import look_at_system
from k3mlx.engine import Engine


def machine_facts(device: str) -> dict[str, Any]:
    """The machine of this run, whose dense parts are on `device`: `cpu`, `metal` or `cuda`."""
    system = look_at_system()
    return {
        "chip": system.chip,
        "architecture": system.architecture,
        "cores": system.cores,
        "performance_cores": system.performance,
        "memory": system.memory.total if system.memory else None,
        "system": system.name,
        "gpu": None if device == "cpu" else gpu_name(),
    }


def gpu_name() -> str:
    """What MLX calls the GPU."""
    return str(import_mlx().device_info().get("device_name", "not named"))


def versions() -> dict[str, str]:
    """Of this package and of those that compute."""
    found = {"k3mlx": __version__, "python": ".".join(map(str, look_at_system().python))}
    for name in ("numpy", "mlx"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def model_facts(engine: Engine) -> dict[str, Any]:
    """Name and sizes of the loaded model."""
    config = engine.config
    return {
        "name": engine.folder.name,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_token,
        "vocab_size": config.vocab_size,
    }


def runs_on(engine: Engine) -> dict[str, Any]:
    """Backend, device, dtype, and the kernel and weight format of each part."""
    report = engine.report()
    parts = {row["part"]: f"{row['kernel']} on {row['device']}, {row['format']}" for row in report["parts"]}
    experts = ("policy", "direct_io", "io_threads", "pipe", "cache_bytes")
    return {
        **{name: report[name] for name in ("backend", "device", "dtype", "prefill_chunk")},
        **parts,
        **{f"experts_{name}": report["experts"][name] for name in experts},
    }
