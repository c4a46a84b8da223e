"""What this package relies on in MLX and MLX does not promise, tried on this machine.

Owns the harmless trials, a few milliseconds at every load. That failures raise is tried by the self-test,
in a process of its own.
"""

from __future__ import annotations

from importlib.metadata import version

import mlx.core as mx
import numpy as np

from k3mlx.devices import gpu_kind


def surprises() -> list[str]:
    """A line for everything that is not as it was in the versions this package was made with."""
    found = []
    for trial in (_views, _slices, _written_in_place, _mxfp4_words, _float32_products):
        try:
            what = trial()
        except Exception as error:
            what = f"{trial.__name__.strip('_').replace('_', ' ')}: {type(error).__name__}: {error}"
        if what:
            found.append(f"mlx {version('mlx')} is not as expected: {what}")
    return found


def _check(holds: bool, what: str) -> str | None:
    return None if holds else what


def _views() -> str | None:
    array = mx.zeros((4096,), mx.uint8)
    mx.eval(array)
    view = np.array(array, copy=False)
    if not view.flags.writeable:
        return "the numpy view of an array cannot be written to"
    view[5] = 7
    return _check(array[5].item() == 7, "a numpy view does not share its array's memory")


def _slices() -> str | None:
    array = mx.zeros((64, 64), mx.uint8)
    mx.eval(array)
    part = array.reshape(-1)[64:128].view(mx.uint32).reshape(4, 4)
    mx.eval(part)
    np.array(array, copy=False)[1] = 255
    return _check(part[3, 3].item() == 0xFFFFFFFF, "a slice seen as words does not share its array's memory")


def _written_in_place() -> str | None:
    if gpu_kind(mx) == "cuda":  # known to copy the buffer, a layer's at a time: memory for one more of them
        return None
    rows = mx.zeros((1 << 12, 16))
    new = mx.ones((2, 16))
    mx.eval(rows, new)
    before = mx.get_active_memory()
    holder = [rows]
    del rows
    updated = mx.slice_update(holder.pop(), new, mx.array([5, 0]), (0, 1))
    mx.eval(updated)
    grown = mx.get_active_memory() - before
    if updated[6, 3].item() != 1 or updated[7, 3].item() != 0:
        return "an update of rows writes other rows"
    return _check(
        grown < updated.nbytes // 2, "an update of rows copies the whole buffer: long contexts cost memory"
    )


def _mxfp4_words() -> str | None:
    # rows of 64: CUDA has no product for shorter ones
    row = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4, np.uint8)
    codes, scales = mx.array(np.tile(row, (64, 1))).view(mx.uint32), mx.full((64, 2), 126, mx.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6] * 4
    got = mx.quantized_matmul(mx.eye(64), codes, scales, mode="mxfp4", group_size=32, bits=4)[:, 0]
    return _check(got.tolist() == [v / 2 for v in values], "mxfp4 codes have other values")


def _float32_products() -> str | None:
    big = mx.full((32, 32), 1 + 2**-12)
    exact = 32 * (1 + 2**-12) ** 2
    error = abs((big @ big)[0, 0].item() - exact)
    return _check(error < 1e-4, "products of float32 numbers have short mantissas (is TF32 on?)")
