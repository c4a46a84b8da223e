"""An overlay of real widths: both backends against the reference in float64 on the dequantised weights.

    K3MLX_TEST_OVERLAY=FOLDER python -m pytest -s -m slow tests/convert/test_slice.py

FOLDER: what `k3mlx convert` made of a slice (`scripts/make_slice.py`). A layer is in memory at a time: about 3 GB.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.checkpoint.overlay import OverlayCheckpoint
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.reference.model import Hooks
from k3mlx.validate.path import REFERENCE, PathSpec, open_path

FOLDER = os.environ.get("K3MLX_TEST_OVERLAY", "")
PIECES = [[5, 3001, 17, 902, 44, 2718, 9, 1600], [33], [2048]]  # a prompt and two decoded tokens
BOUND = 1e-4  # of the largest logit
LARGEST = 60_000_000  # weights of a matrix that mlx decodes here

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="K3MLX_TEST_OVERLAY does not name an overlay"),
]


def logits_of(spec):
    """[T, V] of the pieces, a layer at a time."""
    path, _ = open_path(spec, FOLDER)
    try:
        streams = [path.embed(piece) for piece in PIECES]
        for layer in range(path.config.num_hidden_layers):
            state = path.state(layer)
            for n, stream in enumerate(streams):
                streams[n], state = path.layer(layer, stream, state, Hooks())
        rows = [np.asarray(path.head(stream, Hooks()), np.float64) for stream in streams]
        return np.concatenate(rows), path.parts()
    finally:
        path.close()


@pytest.fixture(scope="module")
def law():
    return logits_of(REFERENCE)[0]


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_engines_compute_with_the_dequantised_weights(law, backend):
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    got, parts = logits_of(PathSpec(backend, "cpu", "float32"))
    formats = {part["part"]: part["format"] for part in parts}
    assert any(words in formats["kda"] for words in ("int4", "int8", "bit affine")), formats
    error, scale = np.abs(got - law).max(), np.abs(law).max()
    print(
        f"{backend}: max |logits - reference| {error:.2e}, largest logit {scale:.3g}, ratio {error / scale:.1e}"
    )
    assert error <= BOUND * scale
    assert (got.argmax(-1) == law.argmax(-1)).all()


def test_the_reference_decodes_as_mlx_does():
    mx = pytest.importorskip("mlx.core")
    with open_checkpoint(Path(FOLDER)) as checkpoint:
        assert isinstance(checkpoint, OverlayCheckpoint)
        some = {n: q for n, q in checkpoint.quantized.items() if np.prod(q.shape) <= LARGEST}
        kinds = {name.rpartition("layers.")[2].partition(".")[2]: name for name in some}
        assert len(kinds) >= 5
        for name in kinds.values():
            info = some[name]
            assert info.biases is not None
            numbers = [
                Checkpoint.widen(checkpoint.read(part), np.float32) for part in (info.scales, info.biases)
            ]
            with mx.stream(mx.cpu):
                parts = mx.array(checkpoint.read(info.codes)), *map(mx.array, numbers)
                theirs = np.array(mx.dequantize(*parts, info.group_size, info.bits))
            np.testing.assert_array_equal(checkpoint.load(name), theirs, err_msg=name)
