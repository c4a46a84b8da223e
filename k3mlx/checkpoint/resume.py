"""The command that fetches what a folder of model files lacks.

Owns where `k3mlx download` keeps its record. Reads names and that record only; never uses the network.
"""

import json
import re
import shlex
from pathlib import Path

RECORD = Path(".k3mlx", "download.json")  # in a local folder, or in a repository's folder in the cache
RECORD_MAX = 50_000_000  # bytes
RELEASED = "moonshotai/Kimi-K3"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

SHIPPED = "k3-nano"  # the model in the package

_CACHED = re.compile(r"models--([^/]+?)--([^/]+)")


def download_command(folder: Path, verify: bool = False) -> str:
    """The shell command that completes `folder`, a snapshot in a Hugging Face cache or a folder of its own.

    verify: files may be damaged that have the right size, so all are to be hashed again.
    """
    folder = Path(folder).absolute()
    if folder.name == SHIPPED and folder.parent.name == "models":
        return "pip install --force-reinstall --no-deps k3mlx"
    words = [*_command(folder), *(["--verify"] if verify else [])]
    return " ".join(word if word.startswith("HF_HUB_CACHE=") else shlex.quote(word) for word in words)


def _command(folder: Path) -> list[str]:
    repository = folder.parent.parent
    cached = _CACHED.fullmatch(repository.name) if folder.parent.name == "snapshots" else None
    if cached is None:
        repo = str(_recorded(folder).get("repo", RELEASED))
        return ["k3mlx", "download", repo, "--local-dir", str(folder)]
    words = ["k3mlx", "download", f"{cached[1]}/{cached[2]}"]
    if _recorded(repository).get("commit") != folder.name:
        words += ["--revision", folder.name]
    return [*_other_cache(repository.parent), *words]


def _other_cache(cache: Path) -> list[str]:
    """The setting that makes `cache` the Hugging Face cache, when it is not."""
    from huggingface_hub.constants import HF_HUB_CACHE  # takes a while to import, and is seldom needed

    same = cache.resolve() == Path(HF_HUB_CACHE).absolute().resolve()
    return [] if same else [f"HF_HUB_CACHE={shlex.quote(str(cache))}"]


def _recorded(root: Path) -> dict[str, object]:
    """What a download recorded in `root`; nothing when that cannot be read, for this is only advice."""
    try:
        if (root / RECORD).stat().st_size > RECORD_MAX:
            return {}
        record = json.loads((root / RECORD).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    usable = isinstance(record, dict) and REPO_ID.fullmatch(str(record.get("repo")))
    return record if usable else {}
