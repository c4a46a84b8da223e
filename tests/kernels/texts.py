"""The generated function of a case, in the forms that the judges read."""

from __future__ import annotations

from k3mlx.kernels import KERNELS, kernel_text
from k3mlx.kernels.cases import Case, launch_of

from .emulator import Emulator, EmulatorMaker, array
from .emulator.generate import Generated, generate


def generated(case: Case, text: tuple[str, str] | None = None, cuda: bool = False) -> Generated:
    """What MLX would generate for this launch; `text` replaces (header, source)."""
    spec = KERNELS[case.stem]
    launch = launch_of(case, EmulatorMaker(Emulator()), array)
    header, source = text or kernel_text(case.stem, cuda=cuda)
    return generate(
        spec.stem,
        [(name, x.shape, x.dtype) for name, x in zip(spec.input_names, launch.inputs, strict=True)],
        list(zip(spec.output_names, launch.output_dtypes, strict=True)),
        header,
        source,
        launch.template,
    )
