"""Which files make up a snapshot: one file, or an index and its shards, and no path that leads elsewhere.

A symbolic link may point into the folder itself or, in a Hugging Face cache, into the blobs of the same
repository. Does not open the shards.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from k3mlx.errors import ModelFilesError

from .untrusted import parse_json, read_bounded, reason, shown, stat_file

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
INDEX_MAX = 250_000_000  # bytes; the released index has 59,764,096


class Layout(NamedTuple):
    """Shard paths by file name; with an index also the file name of each tensor and the total of bytes."""

    shards: dict[str, Path]
    index_path: Path | None
    weight_map: dict[str, str]
    total_size: int | None


def find_layout(folder: Path, elsewhere: Sequence[Path] = ()) -> Layout:
    """Find the files of a snapshot; shards that are not in `folder` are looked for in other folders.

    Raises ModelFilesError if there are none or the index cannot be used.
    """
    if not os.path.isdir(folder):
        raise ModelFilesError(f"{folder}: model folder not found; expected a folder with safetensors in it")
    index = folder / INDEX_NAME
    if os.path.lexists(index):
        check_link(folder, index)
        layout = _read_index(folder, index)
        return layout._replace(shards=_located(layout.shards, elsewhere)) if elsewhere else layout
    single = folder / SINGLE_NAME
    if os.path.lexists(single):
        check_link(folder, single)
        stat_file(single)
        return Layout({SINGLE_NAME: single}, None, {}, None)
    present = len(list(folder.glob("*.safetensors")))
    raise ModelFilesError(
        f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} found"
        f" ({present} other safetensors files); download the missing files"
    )


def check_link(folder: Path, path: Path) -> None:
    """Raise ModelFilesError if `path`, a name in `folder`, leads out of the snapshot."""
    if not os.path.islink(path):
        return
    try:
        root, target = folder.resolve(), path.resolve()
        allowed = [root]
        if root.parent.name == "snapshots":
            allowed.append((root.parent.parent / "blobs").resolve())
    except (OSError, RuntimeError) as error:  # a loop of links, by version of Python
        raise ModelFilesError(f"{path}: link cannot be followed ({reason(error)})") from None
    if target.parent not in allowed:
        raise ModelFilesError(
            f"{path}: links to {target}, outside the snapshot; expected a file in the folder"
            " or in the blobs of its Hugging Face cache"
        )


def _read_index(folder: Path, path: Path) -> Layout:
    index = parse_json(read_bounded(path, INDEX_MAX), str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFilesError(
            f"{path}: weight_map is {shown(weight_map)}, expected tensor names and their files"
        )
    shards: dict[str, Path] = {}
    names: dict[str, str] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name not in names:
            if not _is_plain_name(name):
                raise ModelFilesError(
                    f"{path}: tensor {shown(tensor)} is in {shown(name)},"
                    " expected the name of a safetensors file in the same folder"
                )
            names[name] = name
            shards[name] = folder / name
        weight_map[tensor] = names[name]  # one string for each file, not for each tensor
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Layout(dict(sorted(shards.items())), path, weight_map, total if type(total) is int else None)


def _located(shards: dict[str, Path], elsewhere: Sequence[Path]) -> dict[str, Path]:
    """Shards by name, those that are missing at their path in the first other folder that has them."""
    found = {}
    for name, path in shards.items():
        others = [other / name for other in elsewhere if (other / name).exists()]
        found[name] = others[0] if others and not path.exists() else path
    return found


def _is_plain_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and len(name) < 256
        and name.isprintable()
        and not any(c in name for c in "/\\:")
        and not name.startswith(".")
    )
