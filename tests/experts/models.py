"""Small checkpoints for the tests of streaming, and what their experts hold. Fixtures are in conftest.py."""

import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from k3mlx.checkpoint.snapshot import Checkpoint
from tests.tiny import random_config, write_random_model

SIZES = {
    "num_hidden_layers": 4,
    "num_experts": 9,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 96,
    "vocab_size": 61,
}


def write_streaming_model(folder: Path, experts: str = "mxfp4", seed: int = 5, shards: int = 3) -> Path:
    """Three mixture layers of nine experts each, three for a token; experts spread over the shards."""
    rng = np.random.default_rng(seed)
    return write_random_model(folder, random_config(rng, experts, **SIZES), rng, experts, shards=shards)


def stored(checkpoint: Checkpoint, layer: int, expert: int) -> dict[str, np.ndarray]:
    """An expert's tensors by the checkpoint's own reads."""
    prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
    return {part: checkpoint.raw(prefix + part) for part in checkpoint.expert_tensors(layer, expert)}


def assert_holds(held, checkpoint: Checkpoint, layer: int) -> None:
    """A held expert's views are exactly the bytes in the file."""
    expected = stored(checkpoint, layer, held.expert)
    assert held.parts.keys() == expected.keys()
    for name, array in expected.items():
        assert held.parts[name].dtype == array.dtype, name
        np.testing.assert_array_equal(held.parts[name], array, err_msg=f"layer {layer} {held.expert} {name}")


def reading_threads() -> int:
    return sum(thread.name.startswith("k3mlx-read") for thread in threading.enumerate())


def open_descriptors() -> int:
    """How many descriptors this process has open; 0 where that cannot be seen."""
    folder = Path("/proc/self/fd")
    return len(os.listdir(folder)) if folder.is_dir() else 0


@contextmanager
def deadline(seconds: float):
    """Fail when the block takes longer; a hang shows as a failure of the run's own time limit."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds, f"took longer than {seconds} s"


@contextmanager
def nothing_left_behind():
    """Neither a reading thread nor an open file outlives the block."""
    threads, descriptors = reading_threads(), open_descriptors()
    yield
    assert reading_threads() == threads
    assert open_descriptors() == descriptors
