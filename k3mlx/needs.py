"""How much memory the parts of a model take, from its configuration: weights, state, work of a chunk.

Formulas, and what the process has already; nothing is decided here. Sources: model specification §4.5
and §5 for what is stored, and what the two backends keep beside it while they compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import machine
from .checkpoint.names import KEPT_FLOAT32, TensorSpec, dense_specs, layer_specs
from .checkpoint.snapshot import Checkpoint
from .config import ModelConfig
from .dense import stored_sizes
from .dense_native import choose_dense, stored_format, stored_parts
from .dense_reads import staging_bytes
from .devices import Choice
from .experts.layout import ExpertLayout
from .ranks.part import Part
from .reference.mla import SCORE_ELEMENTS

SizeOf = Callable[[TensorSpec], int]  # bytes of a dense tensor in memory


CONTEXT = 8192  # tokens of a session that a plan has room for


@dataclass(frozen=True)
class DenseBytes:
    """Dense weights in memory: each layer's, and what lies outside the layers; `stored` is a layer's on disk."""

    layers: tuple[int, ...]
    outer: int
    stored: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.layers) + self.outer


@dataclass(frozen=True)
class Needs:
    """What a backend takes for one model, in bytes.

    process: what the process has before anything is loaded. ring: buffers for weights that are not resident,
    on top of `dense.outer`; None if they must all be. state: of one sequence, with the copies a step makes.
    activations: of a pass of so many tokens. scratch: one expert decoded, freed buffers kept,
    in a process of so many bytes. padding: of a slot
    beyond `expert`, the payload. experts, least: how many there are, and how few work.
    """

    process: int
    dense: DenseBytes
    ring: int | None
    state: int
    activations: Callable[[int], int]
    scratch: Callable[[int], int]
    expert: int
    padding: int
    experts: int
    least: int

    @property
    def streamed_least(self) -> int:
        """Weights in memory when none of the layers is resident."""
        return self.dense.total if self.ring is None else min(self.dense.total, self.dense.outer + self.ring)


def backend_needs(
    choice: Choice,
    checkpoint: Checkpoint,
    dtype: str | None,
    context: int = CONTEXT,
    as_stored: bool = False,
    part: Part | None = None,
) -> Needs:
    """The memory that the chosen backend takes for a model and a session of `context` tokens, in terms of bytes.

    as_stored: dense matrices of the numpy backend are not widened (`dense_native`). part: what a rank has of the dense
    weights on mlx, all if None.
    """
    config = checkpoint.config if part is None else part.config
    context = min(config.max_position_embeddings, context)
    dtype = dtype or default_dtype(choice)
    if choice.backend == "numpy":
        item = kda_item = 8 if dtype == "float64" else 4
        size_of = size_as_stored(checkpoint) if as_stored else size_in(item)
        dense = dense_bytes(checkpoint, size_of)
        at_once, many = sum(sorted(dense.layers)[-2:]), len(dense.layers) > 2
        copies = 3  # the old state, the new one, a snapshot
        decoded = config.moe_intermediate_size * config.routed_expert_hidden_size * item

        def scratch(budget: int) -> int:
            return 4 * decoded

    else:
        item, kda_item = (2 if dtype == "bfloat16" else 4), 4
        size_of = size_in_codes(checkpoint, item, size_in(item, KEPT_FLOAT32))
        size_of = size_of if part is None else part.bytes_of(size_of)
        dense = dense_bytes(checkpoint, size_of, part)
        # a layer's arrays are needed until the next one has been evaluated: three of them at once
        at_once, many = sum(sorted(dense.layers)[-3:]), choice.device != "cuda" and len(dense.layers) > 3
        copies, item = 3, 4  # products of CPU streams are float32
        scratch = mlx_cache_limit
    specs = (spec for n in range(config.num_hidden_layers) for spec in layer_specs(checkpoint.config, n))
    largest = max(map(size_of, specs))  # what gaps may add up to
    layout = ExpertLayout(checkpoint)
    return Needs(
        process=machine.footprint() or 0,
        dense=dense,
        ring=at_once + largest + staging_bytes(max(dense.stored)) if many else None,
        state=copies * state_bytes(config, context, item, kda_item),
        activations=lambda tokens: activation_bytes(config, tokens, context, item),
        scratch=scratch,
        expert=layout.payload,
        padding=layout.slot_bytes - layout.payload,
        experts=layout.count,
        least=min(config.num_experts_per_token, layout.count),
    )


def default_needs(choice: Choice, checkpoint: Checkpoint, context: int = CONTEXT) -> Needs:
    """`backend_needs` of a run that leaves dtype and kernels to the engine: what it would take on this machine.

    Loads and checks the C kernels where such a run would (`dense_native.choose_dense`).
    """
    dtype = default_dtype(choice)
    dense, _ = choose_dense("auto", choice.backend, dtype, checkpoint.config.hidden_size, None)
    return backend_needs(choice, checkpoint, dtype, context, as_stored=dense is not None)


def mlx_cache_limit(budget: int) -> int:
    """Bytes of freed buffers that MLX may keep in a process of `budget` bytes."""
    return max(32 << 20, min(1 << 30, budget // 32))


def default_dtype(choice: Choice) -> str:
    """What a backend computes in unless told otherwise."""
    return "float32" if choice.device == "cpu" else "bfloat16"


def dense_bytes(checkpoint: Checkpoint, size_of: SizeOf, part: Part | None = None) -> DenseBytes:
    """The dense weights or a part of them, a tensor's size in memory given by `size_of`."""
    config, stored = checkpoint.config, stored_sizes(checkpoint, part)
    layers = tuple(sum(map(size_of, layer_specs(config, n))) for n in range(config.num_hidden_layers))
    return DenseBytes(layers, sum(map(size_of, dense_specs(config))) - sum(layers), stored)


def experts_only(needs: Needs) -> Needs:
    """The memory of a process without dense weights and sessions."""
    return replace(needs, dense=DenseBytes((), 0, ()), ring=None, state=0)


def size_in(itemsize: int, kept_float32: tuple[str, ...] = ()) -> SizeOf:
    """Sizes with every number in `itemsize` bytes, those of names ending in `kept_float32` in at least four."""

    def size_of(spec: TensorSpec) -> int:
        item = max(4, itemsize) if spec.name.endswith(kept_float32) else itemsize
        return math.prod(spec.shape) * item

    return size_of


def size_in_codes(checkpoint: Checkpoint, itemsize: int, others: SizeOf) -> SizeOf:
    """Sizes with matrices that are stored as codes kept so, their scales and biases in `itemsize` bytes a number."""

    def size_of(spec: TensorSpec) -> int:
        info = checkpoint.quantized.get(spec.name)
        if info is None:
            return others(spec)
        numbers = sum(math.prod(part.shape) for part in (info.scales, info.biases) if part is not None)
        return info.codes.nbytes + (numbers if info.mode != "affine" else numbers * itemsize)

    return size_of


def size_as_stored(checkpoint: Checkpoint) -> SizeOf:
    """Sizes with the matrices that the C kernels take as stored kept so, everything else in float32."""
    others = size_in(4)

    def size_of(spec: TensorSpec) -> int:
        if stored_format(checkpoint, spec) is None:
            return others(spec)
        return sum(part.nbytes for part in stored_parts(checkpoint, spec.name))

    return size_of


def state_bytes(config: ModelConfig, tokens: int, item: int, kda_item: int) -> int:
    """One sequence of `tokens`: KDA states and windows, MLA latents; numbers of `item` and `kda_item` bytes."""
    kda = config.layer_kinds.count("kda")
    width = config.kda_head_dim
    windows = 3 * (config.short_conv_kernel_size - 1) * config.kda_projection
    latents = config.layer_kinds.count("mla") * tokens * (config.kv_lora_rank + config.qk_rope_head_dim)
    return kda * (config.kda_num_heads * width * width * kda_item + windows * item) + latents * item


def activation_bytes(config: ModelConfig, tokens: int, context: int, item: int) -> int:
    """The most that a pass of `tokens` holds at once beside weights, state and one expert's matrices.

    The widest of the parts (attention, dense, shared and routed MLPs), with the residual stream and its
    frozen blocks; counted from the arrays that the reference keeps alive, numbers of `item` bytes.
    """
    blocks = config.num_hidden_layers // config.attn_res_block_size + 1
    stream = config.hidden_size * (2 * blocks + 8)
    kda = 16 * config.kda_projection if "kda" in config.layer_kinds else 0
    heads, width = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    mla = heads * (4 * width + 4 * config.v_head_dim + 2 * config.kv_lora_rank)
    inner = max(config.intermediate_size, config.num_shared_experts * config.moe_intermediate_size)
    chosen = config.num_experts_per_token * config.routed_expert_hidden_size
    routed = chosen + 8 * config.moe_intermediate_size + 4 * config.routed_expert_hidden_size
    widest = max(kda, mla if "mla" in config.layer_kinds else 0, 6 * inner, routed)
    scores = min(SCORE_ELEMENTS, heads * tokens * max(context, tokens))
    return item * (tokens * (stream + widest) + 3 * scores)
