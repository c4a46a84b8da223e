"""What the tests of conversion share: jobs on small models, and folders compared byte by byte."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.manifest import MANIFEST
from k3mlx.convert.formats import PARTS, Formats
from k3mlx.convert.job import Job
from tests.tiny import random_config, write_random_model

SIZES = {
    "num_hidden_layers": 4, "hidden_size": 96, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "num_attention_heads": 3, "intermediate_size": 160, "routed_expert_hidden_size": 64,
    "moe_intermediate_size": 32, "vocab_size": 67, "max_position_embeddings": 500,
}  # fmt: skip


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of sizes that groups of 32 and 64 divide, in three shards."""
    rng = np.random.default_rng(5)
    config = random_config(rng, **SIZES)
    return write_random_model(tmp_path_factory.mktemp("source"), config, rng, dtype="BF16", shards=3)


def job(source: Path, out: Path, bits: int = 4, workers: int = 2, **options: object) -> Job:
    return Job(source, out, Formats(dict.fromkeys(PARTS, bits)), workers, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def overlay(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model with 4 bits, not to be changed."""
    out = tmp_path_factory.mktemp("overlays") / "four"
    job(source, out).run()
    return out


def contents(folder: Path) -> dict[str, str]:
    """A hash of every file by name, hidden ones too; of the manifest without the place of the experts."""
    return {path.name: _hash(path) for path in folder.iterdir()}


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    if path.name == MANIFEST:
        manifest = json.loads(path.read_text())
        manifest["experts"] |= {"relative": "", "absolute": ""}
        digest.update(json.dumps(manifest).encode())
    else:
        with open(path, "rb") as file:
            while data := file.read(8 << 20):
                digest.update(data)
    return digest.hexdigest()
