"""What a launch of each kernel looks like: checks, inputs, template values, grid, outputs.

Owns everything about a launch that follows from shapes and dtypes, for any array type with `shape` and
`dtype` (mlx arrays, or the emulator's). Builds no kernel, runs nothing, imports no array library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Array = Any  # an mlx array or the emulator's
INT_MAX = 2**31 - 1
HEAD_DIMS = (32, 64, 128)
MAX_SOURCES = 9
MAX_BUFFERS = 31
THREADGROUP_BYTES = 32768
ACTIVATIONS = ("float32", "bfloat16", "float16")


class Unsupported(Exception):
    """The kernel cannot take these sizes or dtypes; the plain path can. The message says which and why."""


class Maker(Protocol):
    """Builds kernels for one device and makes the small arrays that go with a launch."""

    name: str  # "metal", "cuda" or "emulator"

    def build(self, spec: Spec) -> Any:
        """A function with the keywords of a built `mx.fast.metal_kernel`."""

    def floats(self, values: Sequence[float]) -> Array:
        """A one-dimensional float32 array."""

    def ints(self, values: Sequence[int]) -> Array:
        """A one-dimensional int32 array."""

    def dtype(self, name: str) -> Any:
        """The array library's dtype of that name."""


@dataclass(frozen=True)
class Spec:
    """A kernel text and the names of its arguments, in the order of their buffers."""

    stem: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    threads: int  # threads of a threadgroup unless a device needs fewer


@dataclass(frozen=True)
class Launch:
    """One launch, in the keywords of a built `mx.fast.metal_kernel`."""

    inputs: list[Array]
    template: list[tuple[str, Any]]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[Any]


_KDA_INPUTS = (
    "q", "k", "v", "z", "b", "gate", "windows", "state", "taps", "A_log", "dt_bias", "o_norm", "sizes", "numbers",
)  # fmt: skip
_KDA_OUTPUTS = ("out", "new_windows", "new_state")
KERNELS = {
    spec.stem: spec
    for spec in (
        Spec("kda_step", _KDA_INPUTS, _KDA_OUTPUTS, 512),
        Spec("kda_prefill", _KDA_INPUTS, _KDA_OUTPUTS, 512),
        Spec(
            "attn_res_mix",
            ("blocks", "partial", "norm", "query", "out_norm", "sizes", "numbers"),
            ("mixed", "normed"),
            512,
        ),
        Spec("route_topk", ("logits", "bias", "numbers"), ("ids", "weights", "flags"), 128),
    )
}

SIMD_WIDTH = 32
WIDTH_PROBE = Spec("simd_width", ("sizes",), ("width",), 2 * SIMD_WIDTH)


def simd_width(maker: Maker) -> Launch:
    """Launch of the probe that asks the device for its SIMD width."""
    threads = WIDTH_PROBE.threads
    return Launch(
        inputs=[maker.ints([1])],
        template=[],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(threads,)],
        output_dtypes=[maker.dtype("int32")],
    )


def dtype_name(array: Array) -> str:
    """`float32` for an array of any library."""
    return str(array.dtype).rsplit(".", 1)[-1]


def _check_shape(kernel: str, name: str, array: Array, expected: tuple[int, ...]) -> None:
    if tuple(array.shape) != expected:
        raise ValueError(f"{kernel}: {name} has shape {tuple(array.shape)}, expected {expected}")


def _check_activations(kernel: str, arrays: dict[str, Array]) -> None:
    names = {name: dtype_name(array) for name, array in arrays.items()}
    if len(set(names.values())) != 1 or next(iter(names.values())) not in ACTIVATIONS:
        raise Unsupported(
            f"{kernel}: activations are {names}, expected one of {', '.join(ACTIVATIONS)} for all"
        )


def kda(
    stem: str, maker: Maker, threads: int,
    q: Array, k: Array, v: Array, z: Array, b: Array, gate: Array, windows: Array, state: Array,
    taps: Array, A_log: Array, dt_bias: Array, o_norm: Array, lower_bound: float, eps: float, l2_eps: float,
) -> Launch:  # fmt: skip
    """Launch of `kda_step` or `kda_prefill`; shapes as `Kernels.kda_step` says."""
    batch, tokens, heads = b.shape
    width, conv = o_norm.shape[0], taps.shape[-1]
    channels = heads * width
    for name, array in (("q", q), ("k", k), ("v", v), ("z", z), ("gate", gate)):
        _check_shape(stem, name, array, (batch, tokens, channels))
    for name, array, expected in (
        ("windows", windows, (batch, 3, conv - 1, channels)),
        ("state", state, (batch, heads, width, width)),
        ("taps", taps, (3, channels, conv)),
        ("A_log", A_log, (heads,)),
        ("dt_bias", dt_bias, (channels,)),
    ):
        _check_shape(stem, name, array, expected)
    _check_activations(stem, {"q": q, "k": k, "v": v, "z": z, "b": b, "gate": gate, "windows": windows})
    if width not in HEAD_DIMS:
        raise Unsupported(f"{stem}: head width {width}, expected one of {HEAD_DIMS}")
    if dtype_name(state) != "float32":
        raise Unsupported(f"{stem}: state is {dtype_name(state)}, expected float32")
    if batch * max(tokens * channels, 3 * (conv - 1) * channels, heads * width * width) > INT_MAX:
        raise Unsupported(f"{stem}: batch {batch} x {tokens} tokens x {channels} channels pass 2^31 elements")
    return Launch(
        inputs=[
            q, k, v, z, b, gate, windows, state, taps, A_log, dt_bias, o_norm,
            maker.ints([tokens]), maker.floats([lower_bound, eps, l2_eps, width**-0.5]),
        ],
        template=[
            ("TYPE", q.dtype), ("HEADS", heads), ("HEAD_DIM", width), ("CONV_WIDTH", conv), ("THREADS", threads),
        ],
        grid=(threads, heads, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, tokens, channels), tuple(windows.shape), tuple(state.shape)],
        output_dtypes=[q.dtype, windows.dtype, state.dtype],
    )  # fmt: skip


def attn_res_mix(
    maker: Maker,
    threads: int,
    blocks: Array,
    partial: Array,
    norm: Array,
    query: Array,
    eps: float,
    out_norm: Array,
) -> Launch:
    """Launch of `attn_res_mix`; shapes as `Kernels.attn_res_mix` says."""
    stem = "attn_res_mix"
    tokens, width = partial.shape
    frozen = 0 if blocks is None else blocks.shape[0]
    if blocks is None:
        blocks = partial
    else:
        _check_shape(stem, "blocks", blocks, (frozen, tokens, width))
    for name, array in (("norm", norm), ("query", query), ("out_norm", out_norm)):
        _check_shape(stem, name, array, (width,))
    _check_activations(stem, {"blocks": blocks, "partial": partial})
    if frozen + 1 > MAX_SOURCES:
        raise Unsupported(f"{stem}: {frozen + 1} sources, expected at most {MAX_SOURCES}")
    if max(frozen, 1) * tokens * width > INT_MAX:
        raise Unsupported(f"{stem}: {frozen} blocks x {tokens} tokens x {width} pass 2^31 elements")
    return Launch(
        inputs=[blocks, partial, norm, query, out_norm, maker.ints([frozen, tokens]), maker.floats([eps])],
        template=[("TYPE", partial.dtype), ("WIDTH", width), ("THREADS", threads)],
        grid=(threads, tokens, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, width), (tokens, width)],
        output_dtypes=[partial.dtype, partial.dtype],
    )


def route_topk(maker: Maker, threads: int, logits: Array, bias: Array, k: int, scaling: float) -> Launch:
    """Launch of `route_topk` on router logits [T, E] in float32."""
    stem = "route_topk"
    tokens, experts = logits.shape
    _check_shape(stem, "bias", bias, (experts,))
    if not 0 < k <= experts:
        raise ValueError(f"{stem}: k is {k}, expected 1 to {experts}, the number of experts")
    if dtype_name(logits) != "float32":
        raise Unsupported(f"{stem}: logits are {dtype_name(logits)}, expected float32")
    if k > threads or 8 * k * (threads // 32) + 4 * k + threads // 8 > THREADGROUP_BYTES:
        raise Unsupported(f"{stem}: {k} experts a token, too many for {threads} threads")
    if tokens * experts > INT_MAX:
        raise Unsupported(f"{stem}: {tokens} tokens x {experts} experts pass 2^31 elements")
    return Launch(
        inputs=[logits, bias, maker.floats([scaling])],
        template=[("EXPERTS", experts), ("TOP", k), ("THREADS", threads)],
        grid=(threads, tokens, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, k), (tokens, k), (tokens,)],
        output_dtypes=[maker.dtype("int32"), logits.dtype, maker.dtype("int32")],
    )
