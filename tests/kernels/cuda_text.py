"""The kernel function that MLX writes around a kernel text on CUDA (mlx 0.32.4), and NVIDIA's run-time compiler.

Owns the CUDA form of a launch: the same text as on Metal, one more header before it. The compiler is the
`nvidia-cuda-nvrtc` wheel with the headers of `nvidia-cuda-runtime` and `nvidia-cuda-cccl`; no GPU is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
from functools import cache
from pathlib import Path

from .emulator.arrays import DTYPES
from .emulator.generate import Generated, template_kind, template_text

# what MLX's own header brings for a kernel: 16-bit floats, arrays, limits
PRELUDE = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/cstdint>
#include <cuda/std/limits>
#include <cooperative_groups.h>
using cuda::std::int32_t;
using cuda::std::uint32_t;
"""
OPTIONS = ("--device-as-default-execution-space", "--std=c++17")
_TYPES = {"float16_t": "__half", "bfloat16_t": "__nv_bfloat16"}


def _type(name: str) -> str:
    return _TYPES.get(name, name)


def cuda_text(generated: Generated) -> str:
    """The translation unit, with the kernel under its own name (`extern "C"`, outside MLX's namespace)."""
    parameters = ",\n    ".join(
        f"{'const ' if p.const else ''}{_type(p.type)}* {p.name}"
        for p in generated.parameters
        if p.buffer is not None
    )
    values = "".join(
        f"  {declaration} {name} = {value};\n"
        for name, declaration, value in (_declaration(name, value) for name, value in generated.template)
    )
    return (
        f"{PRELUDE}{generated.header}\n"
        f'extern "C" __global__ void {generated.name}(\n    {parameters}) {{\n{values}{generated.source}\n}}\n'
    )


def _declaration(name: str, value: bool | int | str) -> tuple[str, str, str]:
    kind = template_kind(value)
    if kind == "typename":
        return name, "using", _type(DTYPES[str(value)][0])
    return name, f"constexpr {kind}", template_text(value)


@cache
def nvrtc() -> tuple[ctypes.CDLL, tuple[str, ...]] | None:
    """The compiler's library and its include options (the wheels', else a CUDA toolkit's), or None."""
    found = importlib.util.find_spec("nvidia")
    wheels = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
    toolkit = Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"))
    for root in (*(path for wheel in wheels for path in sorted(wheel.glob("cu1*"))), toolkit):
        libraries = sorted(root.glob("lib*/libnvrtc.so*"))
        include = root / "include"
        if libraries and (include / "cuda_bf16.h").is_file() and (include / "cccl").is_dir():
            return ctypes.CDLL(str(libraries[0])), (f"-I{include}", f"-I{include / 'cccl'}")
    return None


def code_name(text: str) -> str:
    """File name for the machine code of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32] + ".cubin"


def compile_cuda(text: str, architecture: str = "sm_90") -> tuple[bytes, str]:
    """(machine code, the compiler's log); raises ValueError with the log when the text is refused."""
    found = nvrtc()
    if found is None:
        raise ValueError("nvidia-cuda-nvrtc is not installed")
    library, includes = found
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    options = [o.encode() for o in (*OPTIONS, f"--gpu-architecture={architecture}", *includes)]
    status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    code = b""
    if not status:
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, cubin)
        code = cubin.raw
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        raise ValueError(log.value.decode())
    return code, log.value.decode()
