"""The interface of `mx.fast.metal_kernel` on the emulator, and the maker that launchers build with.

Owns argument checks, copies of strided inputs, clipping of threadgroups, poisoned outputs, and the double
run that shows whether a private variable was used before it was set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from k3mlx.kernels.launch import Spec
from k3mlx.kernels.texts import kernel_text

from . import build
from .arrays import DTYPES, EmuArray, array
from .generate import Generated, generate

POISON = 0xFF  # every byte of an output before a launch: NaN as a float, -1 as an integer
MAX_THREADS = 1024


class Emulator:
    """private_check: run every launch a second time, unchecked and with private variables preset to zero, and
    compare the outputs bit by bit. checked=False runs that second form only, for speed. parallel: both at once."""

    def __init__(
        self,
        private_check: bool = True,
        checked: bool = True,
        deadline: float = build.DEADLINE,
        parallel: bool = True,
    ) -> None:
        self.private_check = private_check
        self.checked = checked
        self.deadline = deadline
        self.parallel = parallel
        self.launches = 0

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> Callable[..., list[EmuArray]]:
        if not output_names:
            raise ValueError("a kernel needs at least one output")
        if not ensure_row_contiguous:
            raise ValueError("the emulator passes row-contiguous inputs only")

        def call(
            *,
            inputs: Sequence[Any],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[Any],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            template: Sequence[tuple[str, Any]] = (),
            init_value: float | None = None,
        ) -> list[EmuArray]:
            arrays = [_as_array(x) for x in inputs]
            if len(arrays) != len(input_names):
                raise ValueError(f"{name}: {len(arrays)} inputs, expected {len(input_names)}")
            if len(output_shapes) != len(output_names) or len(output_dtypes) != len(output_names):
                raise ValueError(f"{name}: expected {len(output_names)} output shapes and dtypes")
            dtypes = [str(d) for d in output_dtypes]
            generated = generate(
                name,
                [(n, a.shape, a.dtype) for n, a in zip(input_names, arrays, strict=True)],
                list(zip(output_names, dtypes, strict=True)),
                header,
                source,
                list(template),
            )
            return self._launch(generated, arrays, output_shapes, dtypes, grid, threadgroup, init_value)

        return call

    def _launch(
        self,
        generated: Generated,
        inputs: list[EmuArray],
        output_shapes: Sequence[Sequence[int]],
        dtypes: list[str],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        init_value: float | None,
    ) -> list[EmuArray]:
        self.launches += 1
        threads = tuple(min(t, g) for t, g in zip(threadgroup, grid, strict=True))
        if np.prod(threads) > MAX_THREADS:
            raise ValueError(f"Thread group size ({np.prod(threads)}) is greater than {MAX_THREADS}")
        contents: dict[str, EmuArray] = {}
        kinds: dict[str, int] = {}
        parameters = iter(p for p in generated.parameters if p.buffer is not None)
        for x in inputs:
            parameter = next(parameters)
            contents[parameter.name] = x
            for extra, value, dtype in _extras(x):
                if f"{parameter.name}_{extra}" in generated.source and x.shape:
                    contents[next(parameters).name] = array(value, dtype)
        kinds = dict.fromkeys(contents, 0)
        for parameter, shape, dtype in zip(parameters, output_shapes, dtypes, strict=True):
            storage = np.empty(tuple(shape), DTYPES[dtype][1])
            storage.reshape(-1).view(np.uint8)[:] = POISON
            value = EmuArray(storage, dtype)
            if init_value is not None:
                value = array(np.full(tuple(shape), init_value), dtype)
            contents[parameter.name] = value
            kinds[parameter.name] = 1 if init_value is None else 2
        buffers = [
            (name, kinds[name], x.storage.itemsize, np.ascontiguousarray(x.storage).tobytes())
            for name, x in contents.items()
        ]
        text = generated.emulator_text()
        modes = ([True] if self.checked else []) + ([False] if self.private_check or not self.checked else [])
        build.runtime()  # before the threads, which would both make it

        def run(checked: bool) -> list[bytes]:
            exe = build.compile_kernel(text, checked)
            return build.execute(exe, buffers, grid, threads, checked, self.deadline)

        if self.parallel:
            with ThreadPoolExecutor(len(modes)) as pool:
                results = list(pool.map(run, modes))
        else:
            results = [run(mode) for mode in modes]
        names = [name for name, kind in kinds.items() if kind]
        outputs = [
            EmuArray(np.frombuffer(data, DTYPES[dtype][1]).reshape(tuple(shape)).copy(), dtype)
            for data, shape, dtype in zip(results[0], output_shapes, dtypes, strict=True)
        ]
        for name, a, b in zip(names, results[0], results[-1], strict=True):
            if a != b:
                raise build.Finding(
                    "private", f"{name} depends on a private variable that was never set", buffer=name
                )
        return outputs


def _as_array(x: Any) -> EmuArray:
    if isinstance(x, EmuArray):
        return x
    if isinstance(x, bool):
        return array(x, "bool")
    if isinstance(x, int):
        return array(x, "int32")
    if isinstance(x, float):
        return array(x, "float32")
    raise TypeError(f"an input is a {type(x).__name__}, expected EmuArray, bool, int or float")


def _extras(x: EmuArray) -> tuple[tuple[str, list[int], str], ...]:
    strides = [int(np.prod(x.shape[n + 1 :])) for n in range(len(x.shape))]
    return (
        ("shape", list(x.shape), "int32"),
        ("strides", strides, "int64"),
        ("ndim", [len(x.shape)], "int32"),
    )


class EmulatorMaker:
    """What `k3mlx.kernels.Kernels` builds with, on the emulator. `texts` replaces kernel texts by stem."""

    name = "emulator"

    def __init__(self, emulator: Emulator, texts: dict[str, tuple[str, str]] | None = None) -> None:
        self.emulator = emulator
        self.texts = texts or {}

    def build(self, spec: Spec) -> Callable[..., list[EmuArray]]:
        header, source = self.texts.get(spec.stem) or kernel_text(spec.stem)
        return self.emulator.metal_kernel(
            name=spec.stem,
            input_names=spec.input_names,
            output_names=spec.output_names,
            source=source,
            header=header,
        )

    def floats(self, values: Sequence[float]) -> EmuArray:
        return array(list(values), "float32")

    def ints(self, values: Sequence[int]) -> EmuArray:
        return array(list(values), "int32")

    def dtype(self, name: str) -> str:
        return name
