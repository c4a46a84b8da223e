"""Which model a plan is for: a folder, an overlay, a repository of which only small files are fetched, or the release.

Reads config, index and manifest; of a conversion by mlx-lm, which has few tensors, the headers too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3mlx.checkpoint.hub import resolve
from k3mlx.checkpoint.layout import INDEX_NAME, Layout, find_layout
from k3mlx.checkpoint.manifest import is_overlay, read_manifest
from k3mlx.checkpoint.mlx_lm import MlxLmCheckpoint, is_conversion
from k3mlx.checkpoint.resume import REPO_ID
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.vision import vision_specs
from k3mlx.config import ModelConfig, load_config
from k3mlx.convert.formats import PARTS, Formats
from k3mlx.errors import ModelFilesError, UsageError

from .paper import PaperCheckpoint
from .released import NAME, RELEASED

FORMATS = {"bf16": None, "int8": 8, "int4": 4}  # what `k3mlx convert --bits` makes of the released weights


@dataclass(frozen=True)
class Source:
    """A model to plan for: its dense weights in each format that is there or could be made, by name of the format.

    total: bytes of all tensors as the index has it, None without one. vision: of those the part that is not used.
    """

    name: str
    origin: str
    config: ModelConfig
    formats: dict[str, Checkpoint]
    total: int | None = None
    vision: int | None = None


def describe(model: str | None) -> Source:
    """The model that `--model` names, None for the released Kimi K3 without any files.

    Raises ModelFilesError for a folder that is no model, or a repository of which config and index cannot be had.
    """
    if model is None:
        vision = sum(spec.nbytes for spec in vision_specs())
        return Source(NAME, "the numbers of the release", RELEASED, _convertible(RELEASED), vision=vision)
    folder = _folder(model)
    if is_overlay(folder):
        return _overlay(model, folder)
    layout = _index(folder)
    if layout is not None and is_conversion(layout):
        opened = MlxLmCheckpoint.open(folder, layout=layout)
        return Source(
            model,
            f"{folder}, a conversion by mlx-lm",
            opened.config,
            {"as stored": opened},
            layout.total_size,
        )
    config = load_config(folder)
    return Source(
        model, str(folder), config, _convertible(config), None if layout is None else layout.total_size
    )


def _overlay(model: str, folder: Path) -> Source:
    settings = read_manifest(folder).settings
    try:
        formats = Formats({part: int(settings["bits"][part]) for part in PARTS}, int(settings["group_size"]))
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise ModelFilesError(
            f"{folder}: the overlay's formats cannot be used ({error}); convert again"
        ) from None
    config = load_config(folder)
    return Source(model, f"{folder}, an overlay", config, {"as stored": PaperCheckpoint(config, formats)})


def _convertible(config: ModelConfig) -> dict[str, Checkpoint]:
    formats: dict[str, Checkpoint] = {}
    for name, bits in FORMATS.items():
        chosen = None if bits is None else Formats(dict.fromkeys(PARTS, bits))
        formats[name] = PaperCheckpoint(config, chosen)
    return formats


def _index(folder: Path) -> Layout | None:
    """The index of a folder, or its single file; None when there is neither yet."""
    try:
        return find_layout(folder)
    except ModelFilesError:
        if (folder / INDEX_NAME).exists():
            raise
        return None


def _folder(model: str) -> Path:
    """The folder with the model's small files; those of a repository that is not here are fetched."""
    try:
        return resolve(model)
    except ModelFilesError:
        if not REPO_ID.fullmatch(model):
            raise
    return _fetched(model)


def _fetched(repo: str) -> Path:
    """Config and, if there is one, index of a repository, in the Hugging Face cache. HF_HUB_OFFLINE is honoured."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(repo, "config.json"))
        try:
            hf_hub_download(repo, INDEX_NAME, revision=config.parent.name)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            pass  # a model of a single file has none
    except Exception as error:  # the client raises its own errors, those of its HTTP library, and OSError
        reason = " ".join(str(error).split())[:200]
        raise ModelFilesError(
            f"{repo}: config.json and index cannot be fetched ({reason}); plan for a folder, or without --model"
        ) from None
    return config.parent
