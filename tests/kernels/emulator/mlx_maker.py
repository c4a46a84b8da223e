"""The emulator behind MLX arrays, so that a whole engine runs on it: every launch is eager and goes through numpy.

Apart from the rest because it needs mlx. Does not work inside `mx.compile`, where arrays have no values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from k3mlx.kernels.launch import Spec, dtype_name

from .arrays import EmuArray
from .launcher import Emulator, EmulatorMaker


def to_emulator(x: mx.array) -> EmuArray:
    name = dtype_name(x)
    return EmuArray(np.array(x.view(mx.uint16) if name == "bfloat16" else x), name)


def to_mlx(x: EmuArray) -> mx.array:
    made = mx.array(x.storage)
    return made.view(mx.bfloat16) if x.dtype == "bfloat16" else made


class EmulatedMlxMaker:
    """A `Maker` for engines; `launches` counts what went through the emulator."""

    name = "emulator"

    def __init__(self, emulator: Emulator, texts: dict[str, tuple[str, str]] | None = None) -> None:
        self._maker = EmulatorMaker(emulator, texts)
        self._emulator = emulator

    @property
    def launches(self) -> int:
        return self._emulator.launches

    def build(self, spec: Spec) -> Callable[..., list[mx.array]]:
        kernel = self._maker.build(spec)

        def call(
            *, inputs: Sequence[mx.array], template: Any, output_dtypes: Sequence[Any], **rest: Any
        ) -> list[mx.array]:
            outputs = kernel(
                inputs=[to_emulator(x) for x in inputs],
                template=[(n, v if isinstance(v, (bool, int)) else _name(v)) for n, v in template],
                output_dtypes=[_name(d) for d in output_dtypes],
                **rest,
            )
            return [to_mlx(x) for x in outputs]

        return call

    def floats(self, values: Sequence[float]) -> mx.array:
        return mx.array(list(values), mx.float32)

    def ints(self, values: Sequence[int]) -> mx.array:
        return mx.array(list(values), mx.int32)

    def dtype(self, name: str) -> Any:
        return getattr(mx, name)


def _name(dtype: Any) -> str:
    return str(dtype).rsplit(".", 1)[-1]
