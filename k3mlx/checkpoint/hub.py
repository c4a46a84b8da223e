"""Where a model is: a local folder, a repository in the local Hugging Face cache, or the model that ships.

Looks at names and folders only and never uses the network. Does not open the model.
"""

import os
import re
from pathlib import Path

from k3mlx.errors import ModelFilesError, UsageError

from .resume import REPO_ID, SHIPPED
from .untrusted import reason

_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve(model: str | Path | None = None) -> Path:
    """The folder of a model: `model` itself if it exists, else the cached snapshot of that repository.

    None is the small model that ships with the package. Raises ModelFilesError when there is no such folder,
    when it is empty or has no config.json, and for a repository that is not in the cache, with the command
    that downloads it.
    """
    if model == "":
        raise UsageError("model is an empty name; expected a folder or a repository, or nothing for k3-nano")
    if model is None:
        return _checked(Path(__file__).parents[1] / "models" / SHIPPED, "reinstall k3mlx")
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):
        return _checked(path, "expected config.json, tiktoken.model and safetensors")
    if isinstance(model, str) and REPO_ID.fullmatch(model):
        return _cached(model)
    raise ModelFilesError(
        f"{model}: model folder not found; expected a folder, or a repository like moonshotai/Kimi-K3"
    )


def _checked(folder: Path, advice: str) -> Path:
    if not os.path.exists(folder):
        raise ModelFilesError(f"{folder}: model folder not found; {advice}")
    if not os.path.isdir(folder):
        raise ModelFilesError(f"{folder}: a file, expected the folder that holds config.json")
    try:
        empty = next(folder.iterdir(), None) is None
    except OSError as error:
        raise ModelFilesError(f"{folder}: cannot be read ({reason(error)})") from None
    if empty:
        raise ModelFilesError(f"{folder}: model folder is empty; {advice}")
    if not os.path.exists(folder / "config.json"):
        raise ModelFilesError(f"{folder}: no config.json in this folder; {advice}")
    return folder


def _cached(repo_id: str) -> Path:
    """The snapshot that `main` names in the cache, or the only one there is."""
    from huggingface_hub.constants import HF_HUB_CACHE  # takes longer to import than `k3mlx --help` may

    repo = Path(HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
    download = f"download it with: k3mlx download {repo_id}"
    snapshots = repo / "snapshots"
    try:
        commit = (repo / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        commit = ""
    if _COMMIT.fullmatch(commit) and os.path.isdir(snapshots / commit):
        return _checked(snapshots / commit, download)
    there = sorted(path for path in snapshots.glob("*") if os.path.isdir(path))
    if len(there) == 1:
        return _checked(there[0], download)
    if there:
        raise ModelFilesError(
            f"{repo}: {len(there)} snapshots and no main; give the folder of one, such as {there[0]}"
        )
    raise ModelFilesError(
        f"{repo_id}: neither a folder here nor in the Hugging Face cache {HF_HUB_CACHE}; {download}"
    )
