"""Dense matrices that the C kernels multiply with as they are stored: the choice, which they are, and their bytes.

Owns the rule by which a tensor is kept as stored. Reading is `dense_numpy.py`, the products `kernels/cpu_linear.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .blas import SMALL_HIDDEN
from .checkpoint.names import TensorSpec, dense_specs
from .checkpoint.quantized import QuantizedInfo
from .checkpoint.safetensors import TensorInfo
from .checkpoint.snapshot import Checkpoint
from .config import ModelConfig
from .errors import UsageError
from .experts.native import choose_kernels
from .kernels.cpu import CpuKernels
from .kernels.cpu_linear import Linear
from .kernels.cpu_matrix import Matrix

DENSE_KERNELS = ("auto", "native", "numpy")
_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# rows of the embedding are looked up, kv_b is cut into heads, queries and taps are no matrices
_OTHERWISE_USED = ("embed_tokens.weight", "kv_b_proj.weight", "_res_proj.weight", "_conv1d.weight")


def choose_dense(
    kernel: str, backend: str, dtype: str, hidden_size: int, threads: int | None
) -> tuple[CpuKernels | None, str | None]:
    """The kernels for dense weights of a numpy engine, None for numpy's own products, and a line about a fallback.

    kernel: `native`, `numpy`, or `auto`: native in float32 where it is built and has computed right on this machine
    just now; a small model, whose products cost less than waking a thread, stays on numpy. Raises UsageError for
    what cannot be, ResourceError for native kernels that were asked for and cannot be had.
    """
    if kernel not in DENSE_KERNELS:
        raise UsageError(f"dense_kernel is {kernel!r}, expected one of {', '.join(DENSE_KERNELS)}")
    if kernel == "native" and (backend != "numpy" or dtype != "float32"):
        raise UsageError(f"dense_kernel native computes in float32 on numpy, not in {dtype} on {backend}")
    if kernel == "numpy" or backend != "numpy" or dtype != "float32":
        return None, None
    if kernel == "auto" and hidden_size <= SMALL_HIDDEN:
        return None, None
    kernels, why = choose_kernels(kernel, threads)
    return kernels, why and f"dense weights widened, on numpy: {why}"


def stored_format(checkpoint: Checkpoint, spec: TensorSpec) -> str | None:
    """What the kernels would call a tensor that they multiply with as stored; None for one that is widened."""
    if len(spec.shape) != 2 or spec.name.endswith(_OTHERWISE_USED):
        return None
    codes = checkpoint.quantized.get(spec.name)
    if codes is not None:
        return _format_of_codes(codes)
    return _FLOATS.get(checkpoint.tensors[spec.name].dtype)


def stored_parts(checkpoint: Checkpoint, name: str) -> tuple[TensorInfo, ...]:
    """The stored tensors of a matrix that has a `stored_format`: its numbers, or codes, scales and biases."""
    codes = checkpoint.quantized.get(name)
    if codes is None:
        return (checkpoint.tensors[name],)
    return tuple(part for part in (codes.codes, codes.scales, codes.biases) if part is not None)


def linear(kernels: CpuKernels, checkpoint: Checkpoint, name: str, parts: Sequence[NDArray]) -> Linear:
    """The weight of that name from the arrays of its `stored_parts`, BF16 as uint16."""
    info = checkpoint.quantized.get(name)
    if info is None:
        return Linear(kernels, Matrix.dense(parts[0]))
    if info.mode == "mxfp4":
        return Linear(kernels, Matrix.mxfp4(parts[0].view(np.uint8), parts[1]))
    codes, scales, biases = parts
    return Linear(kernels, Matrix.affine(codes, scales, biases, info.bits, info.group_size))


def formats(checkpoint: Checkpoint) -> dict[str, str]:
    """The formats that each part of a report (`Backend.parts_report`) has matrices in, of parts that have any."""
    found: dict[str, dict[str, None]] = {}
    for spec in dense_specs(checkpoint.config):
        form, part = stored_format(checkpoint, spec), _part(checkpoint.config, spec.name)
        if form is not None and part is not None:
            found.setdefault(part, {})[form] = None
    return {part: ", ".join(forms) for part, forms in found.items()}


def _part(config: ModelConfig, name: str) -> str | None:
    if name == "lm_head.weight":
        return "head"
    if ".self_attn." in name:
        return config.layer_kinds[int(name.split(".")[2])]
    owners = {".shared_experts.": "shared_experts", ".gate.weight": "router", ".mlp.": "dense_mlp"}
    return next((part for stem, part in owners.items() if stem in name), None)


def _format_of_codes(info: QuantizedInfo) -> str | None:
    if info.mode == "mxfp4":
        return "mxfp4"
    known = info.mode == "affine" and info.bits in (4, 8) and info.group_size in (32, 64, 128)
    alike = (
        info.biases is not None and info.scales.dtype == info.biases.dtype and info.scales.dtype in _FLOATS
    )
    return f"int{info.bits}" if known and alike else None
