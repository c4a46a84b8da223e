"""The list of experts that were in memory when a model was last closed, kept beside the user's cache.

A hint and never more: a list that is missing, damaged or of other files is no list.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from k3mlx.checkpoint.writer import replacing

from .layout import ExpertLayout
from .policies import Key

LIST_MAX = 16 << 20  # bytes of a list; the released model has 82,432 experts


def user_cache() -> Path:
    """The folder for this program in the user's cache."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "k3mlx"


def residency_path(model: Path) -> Path:
    """Where the list of a model's folder is."""
    return user_cache() / f"experts-{hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]}.json"


def save_residency(path: Path, keys: list[Key]) -> None:
    """Write the list, the most valuable first. A folder that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(keys, separators=(",", ":")).encode())
    except OSError:
        return


def load_residency(path: Path, layout: ExpertLayout) -> list[Key]:
    """The list, without what the model does not have; empty when there is none."""
    try:
        if path.stat().st_size > LIST_MAX:
            return []
        listed = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    layers, experts = set(layout.layers), range(layout.experts)
    found: dict[Key, None] = {}
    for item in listed if isinstance(listed, list) else ():
        if isinstance(item, list) and len(item) == 2 and all(type(n) is int for n in item):
            layer, expert = item
            if layer in layers and expert in experts:
                found[layer, expert] = None
    return list(found)
