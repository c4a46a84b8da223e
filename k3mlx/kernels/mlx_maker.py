"""Kernels built by MLX, for Metal or for CUDA.

Owns the calls of `mx.fast.metal_kernel` and `mx.fast.cuda_kernel`. Whether a device may be used is
decided elsewhere (see `k3mlx/selftest.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .launch import Spec
from .texts import kernel_text


def device_kind() -> str | None:
    """`metal` or `cuda`, whichever this mlx has a device for, else None."""
    if mx.metal.is_available():
        return "metal"
    if hasattr(mx, "cuda") and mx.cuda.is_available():
        return "cuda"
    return None


class MlxMaker:
    """Builds kernels for the GPU of this mlx; kind is `metal` or `cuda`, None asks mlx."""

    def __init__(self, kind: str | None = None) -> None:
        found = kind or device_kind()
        if found is None:
            raise ValueError(
                "mlx has neither a Metal nor a CUDA device here; use Kernels(None) for the plain paths"
            )
        self.name = found
        self._small: dict[tuple[Any, ...], mx.array] = {}

    def build(self, spec: Spec) -> Any:
        header, source = kernel_text(spec.stem, cuda=self.name == "cuda")
        make = mx.fast.cuda_kernel if self.name == "cuda" else mx.fast.metal_kernel
        return make(
            name=spec.stem,
            input_names=list(spec.input_names),
            output_names=list(spec.output_names),
            source=source,
            header=header,
        )

    def floats(self, values: Sequence[float]) -> mx.array:
        return self._cached(tuple(values), mx.float32)

    def ints(self, values: Sequence[int]) -> mx.array:
        return self._cached(tuple(values), mx.int32)

    def dtype(self, name: str) -> mx.Dtype:
        return getattr(mx, name)

    def _cached(self, values: tuple[float, ...], dtype: mx.Dtype) -> mx.array:
        # a few words that hardly change: made once, so that a token does not upload them again
        key = (dtype, *values)
        if key not in self._small:
            if len(self._small) > 256:
                self._small.clear()
            self._small[key] = mx.array(values, dtype=dtype)
        return self._small[key]
