"""Run Kimi K3 from the checkpoint as released.

    import k3mlx
    with k3mlx.load() as engine:
        print(k3mlx.generate(engine, prompt="Hello"))

The names below are imported at first use, so that `import k3mlx` stays quick and pulls in no backend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, Session, load
    from .generation import complete, generate, stream_generate

__version__ = "0.1.0"
__all__ = ["Engine", "Session", "complete", "generate", "load", "stream_generate"]

_HOMES = {
    "Engine": "engine",
    "Session": "engine",
    "load": "engine",
    "complete": "generation",
    "generate": "generation",
    "stream_generate": "generation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'k3mlx' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
