"""How long this machine takes where the disk waits: two short measurements, of memory and of arithmetic."""

from __future__ import annotations

import math
from time import perf_counter

import numpy as np

from k3mlx.checkpoint.names import dense_specs
from k3mlx.config import ModelConfig

from .ledger import token_bytes
from .speed import Host, Range

SPREAD = 3.0  # between the bound that was measured and what a run may take
_VECTOR = 4096  # columns of the matrix that is read from memory: 128 MB
_SQUARE = 1024  # of the product that is computed
_TRIES = 3


def measure(config: ModelConfig, weights: int) -> Host:
    """The bounds of this machine's BLAS for one token, and SPREAD times that. weights: bytes of dense weights in use.

    Reads 128 MB of memory three times; takes a fraction of a second.
    """
    memory, flops = _memory_rate(), _flops()
    token = (weights + token_bytes(config)) / memory
    arithmetic = 2 * active_parameters(config) / flops
    return Host(
        Range(token, SPREAD * token),
        Range(arithmetic, SPREAD * arithmetic),
        f"measured now: {memory / 1e9:.0f} GB/s from memory, {flops / 1e9:.0f} GFLOP/s;"
        f" up to {SPREAD:.0f} times longer",
    )


def active_parameters(config: ModelConfig) -> int:
    """Weights that one token is multiplied with: everything but the embedding table and other experts."""
    dense = sum(math.prod(spec.shape) for spec in dense_specs(config) if "embed_tokens" not in spec.name)
    moe = len(config.moe_layers)
    expert = 3 * config.moe_intermediate_size * config.routed_expert_hidden_size
    return dense + moe * config.num_experts_per_token * expert


def _memory_rate() -> float:
    """Bytes a second of a product of a matrix and a vector."""
    matrix = np.ones((8 * 1024, _VECTOR), np.float32)
    vector = np.ones(_VECTOR, np.float32)
    return matrix.nbytes / min(_seconds(matrix, vector) for _ in range(_TRIES))


def _flops() -> float:
    square = np.ones((_SQUARE, _SQUARE), np.float32)
    return 2 * _SQUARE**3 / min(_seconds(square, square) for _ in range(_TRIES))


def _seconds(left: np.ndarray, right: np.ndarray) -> float:
    started = perf_counter()
    left @ right
    return perf_counter() - started
