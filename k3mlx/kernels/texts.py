"""Where the kernel texts are, and what a compiler is given of them.

Owns the look-up of `custom_kernels`; knows nothing of what the texts compute.
"""

import hashlib
from functools import cache
from pathlib import Path

from k3mlx.errors import K3Error

COMMON = "k3_common.metal"
CUDA = "k3_cuda.h"


@cache
def kernels_folder() -> Path:
    """The folder of kernel texts: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "custom_kernels", package.parent / "custom_kernels"):
        if (folder / COMMON).is_file():
            return folder
    raise K3Error(
        f"kernel texts not found: {COMMON} is neither in {package / 'custom_kernels'} nor in "
        f"{package.parent / 'custom_kernels'}; reinstall k3mlx"
    )


@cache
def read_text(name: str) -> str:
    """One file of the folder, exactly as it is; the texts are plain ASCII."""
    return (kernels_folder() / name).read_bytes().decode("ascii")


def kernel_text(stem: str, cuda: bool = False) -> tuple[str, str]:
    """(header, source) of a kernel as the launch interface takes them; CUDA gets one more header."""
    common = read_text(COMMON)
    return (read_text(CUDA) + common if cuda else common), read_text(f"{stem}.metal")


def texts_digest(stems: tuple[str, ...]) -> str:
    """A hash over the texts of these kernels, for results that hold only as long as the texts do."""
    digest = hashlib.sha256()
    for name in (COMMON, CUDA, *(f"{stem}.metal" for stem in stems)):
        digest.update(read_text(name).encode())
    return digest.hexdigest()
