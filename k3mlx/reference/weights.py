"""The dense weights of a checkpoint as numpy arrays in the dtype the reference computes in.

Keys are the checkpoint's own names without module prefix and `.weight`. Routed experts are not
loaded here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from k3mlx.checkpoint.names import dense_specs, layer_prefix, layer_specs
from k3mlx.config import ModelConfig

from .ops import Array

Weights = dict[str, Array]


class Tensors(Protocol):
    """Dense tensors by name, as `Checkpoint.load` gives them."""

    config: ModelConfig

    def load(self, name: str, dtype: DTypeLike = ...) -> NDArray: ...


@dataclass(frozen=True)
class LayerWeights:
    """One layer: its norms and residual mixes, its attention, and its dense MLP or mixture of experts."""

    norms: Weights
    attention: Weights
    ffn: Weights


def load_outer(checkpoint: Tensors, dtype: np.dtype) -> Weights:
    """Everything outside the layers: embedding, head, final norm, output mix (query as [D])."""
    names = [
        spec.name for spec in dense_specs(checkpoint.config) if not spec.name.startswith("model.layers.")
    ]
    return {_key(name): _vector(name, checkpoint.load(name, dtype)) for name in names}


def load_layer(checkpoint: Tensors, layer: int, dtype: np.dtype) -> LayerWeights:
    """One layer without its routed experts.

    The three convolutions become one entry `taps` [3, P, W]; mixing queries stored as [1, D] become [D].
    """
    groups: dict[str, Weights] = {"norms": {}, "self_attn": {}, "mlp": {}, "block_sparse_moe": {}}
    prefix = layer_prefix(layer)
    for spec in layer_specs(checkpoint.config, layer):
        module, _, name = spec.name.removeprefix(prefix).partition(".")
        if module not in groups:
            module, name = "norms", module
        groups[module][_key(name)] = _vector(spec.name, checkpoint.load(spec.name, dtype))
    attention = groups["self_attn"]
    if checkpoint.config.layer_kinds[layer] == "kda":
        streams = [attention.pop(f"{stream}_conv1d") for stream in "qkv"]  # each [P, 1, W]
        attention["taps"] = np.ascontiguousarray(np.stack(streams)[:, :, 0])
    return LayerWeights(groups["norms"], attention, groups["mlp"] or groups["block_sparse_moe"])


def _key(name: str) -> str:
    return name.removesuffix(".weight")


def _vector(name: str, array: Array) -> Array:
    return array[0] if name.endswith("_res_proj.weight") else array
