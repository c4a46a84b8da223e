"""Write the released snapshot without its weights: sparse files with true headers, shapes, dtypes and sizes.

    python scripts/make_sparse.py FOLDER

1.56 TB as `ls` sees it, about 140 MB on disk; reads of weights give zeros. For testing whatever looks at files.
Config, index and vocabulary are the released ones (by default under K3MLX_TEST_DATA, else ../shared). Tensors lie
in the order in which the safetensors library writes them, widest dtype first and then by name: with it the
header of shard 2 has the 818,696 bytes of the released file.
"""

from __future__ import annotations

import argparse
import errno
import gzip
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from k3mlx.checkpoint.layout import INDEX_NAME
from k3mlx.checkpoint.names import TensorSpec, strip_prefix, tensor_specs
from k3mlx.checkpoint.safetensors import ITEMSIZES
from k3mlx.checkpoint.vision import vision_specs
from k3mlx.checkpoint.writer import encode_header
from k3mlx.config import ModelConfig

DATA = Path(os.environ.get("K3MLX_TEST_DATA", Path(__file__).resolve().parents[2] / "shared")) / "data"
VOCABULARY = ("tiktoken.model", "tokenizer_config.json")  # copied when they lie beside the config
PROBE_BYTES = 16 << 20


class Sizes(NamedTuple):
    """Bytes of all shards as a listing shows them, and as they take room on the disk."""

    apparent: int
    real: int


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path, default=DATA / "config.json")
    parser.add_argument(
        "--index", type=Path, default=DATA / f"{INDEX_NAME}.gz", help="as it is, or compressed by gzip"
    )
    args = parser.parse_args(argv)
    try:
        sizes = make_sparse(args.folder, args.config, args.index)
    except OSError as error:
        parser.exit(1, f"{error.filename or args.folder}: {error.strerror or error}\n")
    print(f"{args.folder}: {sizes.apparent:,} bytes, {sizes.real:,} on disk")


def make_sparse(folder: Path, config: Path, index: Path) -> Sizes:
    """Write config, index, vocabulary if there is one, and every shard of the index to `folder`.

    Raises OSError: a file system without sparse files, or one that does not take files of this size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_sparse(folder)
    text = (gzip.decompress if index.suffix == ".gz" else bytes)(index.read_bytes())
    (folder / INDEX_NAME).write_bytes(text)
    for name in VOCABULARY:
        if (config.parent / name).is_file():
            shutil.copyfile(config.parent / name, folder / name)
    shutil.copyfile(config, folder / "config.json")
    return write_shards(folder, json.loads(config.read_bytes()), json.loads(text)["weight_map"])


def write_shards(folder: Path, config: dict[str, Any], weight_map: Mapping[str, str]) -> Sizes:
    """Write the shards that `weight_map` names, one at a time. Raises OSError."""
    parsed = ModelConfig.from_dict(config)
    specs = {spec.name: spec for spec in tensor_specs(parsed, parsed.experts_are_mxfp4)}
    specs |= {spec.name: spec for spec in vision_specs()}
    shards: dict[str, list[TensorSpec]] = {}
    for name, shard in weight_map.items():
        shards.setdefault(shard, []).append(specs[strip_prefix(name)]._replace(name=name))
    statuses = [_write_shard(folder / shard, shards[shard]) for shard in sorted(shards)]
    return Sizes(sum(s.st_size for s in statuses), sum(s.st_blocks * 512 for s in statuses))


def _write_shard(path: Path, specs: list[TensorSpec]) -> os.stat_result:
    """Header first, then a hole for the data, in the order of the safetensors library."""
    ordered = sorted(specs, key=lambda spec: (-ITEMSIZES[spec.dtypes[0]], spec.name))
    head = encode_header((spec.name, spec.dtypes[0], spec.shape) for spec in ordered)
    size = len(head) + sum(spec.nbytes for spec in ordered)
    with open(path, "wb") as file:
        file.write(head)
        try:
            file.truncate(size)
        except OSError as error:
            if error.errno not in (errno.EFBIG, errno.EINVAL):
                raise
            raise OSError(
                error.errno, f"this file system takes no file of {size:,} bytes; choose another", str(path)
            ) from None
    return path.stat()


def _check_sparse(folder: Path) -> None:
    """A file with a hole must not take the room of the hole: the whole would be 1.56 TB."""
    probe = folder / ".sparse.tmp"
    try:
        with open(probe, "wb") as file:
            file.truncate(PROBE_BYTES)
        blocks = getattr(probe.stat(), "st_blocks", None)
    finally:
        probe.unlink(missing_ok=True)
    if blocks is None or blocks * 512 >= PROBE_BYTES:
        raise OSError(
            errno.ENOTSUP,
            "this file system has no sparse files, expected one such as APFS, ext4 or xfs",
            str(folder),
        )


if __name__ == "__main__":
    main()
