"""Seconds of a token and of a prompt, as ranges: bytes from the disk, and time in which the disk waits.

    token  = (experts of a token * (1 - hit rate) + dense weights that are not resident) / (rate * share) + other
    prompt = (experts that its chunks touch + dense weights of its passes) / (rate * share) + tokens * arithmetic

Slow and fast ends take the low and high hit rate, the lower and upper share of the disk's rate and the larger and
smaller time of everything else. Shares and times for Macs are assumptions: read off published profiles of other engines
and chosen so that the ranges hold their published rates. No Mac has been measured with this engine.
"""

from __future__ import annotations

from typing import NamedTuple

from k3mlx.config import ModelConfig

from .ledger import expert_bytes, token_bytes

WIDEST = (
    2.5  # largest over smallest rate that is told: the first tokens of a text may be slower than the range
)
DISK_SHARE = (0.75, 1.0)  # of the probed rate that decoding gets; 0.77 to 0.85 in published profiles


class Range(NamedTuple):
    """A quantity, smallest and largest."""

    low: float
    high: float


class Host(NamedTuple):
    """Seconds a token in which the disk waits, smallest and largest: decoding, and in a prompt."""

    other: Range
    arithmetic: Range
    basis: str


MAC = Host(
    Range(0.55, 1.15),
    Range(0.17, 0.27),
    "published profiles of exact engines: about 0.9 s a token outside reads, 0.17 to 0.27 s a prompt token",
)


def decode(
    config: ModelConfig, hits: Range, dense_read: int, rate: float, host: Host, share: float = 1
) -> Range:
    """Tokens a second. dense_read: bytes of dense weights that each pass reads; rate: bytes a second; share: of a
    token's experts that this machine computes."""
    experts = token_bytes(config) * share

    def seconds(hit: float, share: float, other: float) -> float:
        return (experts * (1 - hit) + dense_read) / (rate * share) + other

    slow = seconds(hits.low, DISK_SHARE[0], host.other.high)
    fast = seconds(hits.high, DISK_SHARE[1], host.other.low)
    return Range(1 / min(slow, WIDEST * fast), 1 / fast)


def prompt(
    config: ModelConfig, tokens: int, chunk: int, dense_read: int, rate: float, host: Host, share: float = 1
) -> Range:
    """Seconds until a prompt of `tokens` has been read, `chunk` at a time, each expert once a pass and layer.

    share: of a layer's experts that this machine reads.
    """
    passes = [chunk] * (tokens // chunk) + ([tokens % chunk] if tokens % chunk else [])
    moe = len(config.moe_layers)
    touched = sum(distinct(config, size) for size in passes)
    nbytes = share * moe * touched * expert_bytes(config) + len(passes) * dense_read
    return Range(
        nbytes / (rate * DISK_SHARE[1]) + tokens * host.arithmetic.low,
        nbytes / (rate * DISK_SHARE[0]) + tokens * host.arithmetic.high,
    )


def distinct(config: ModelConfig, tokens: int) -> float:
    """Experts of a layer that `tokens` touch if routing is uniform (model specification §4.5); it is an upper bound."""
    missed = 1 - config.num_experts_per_token / config.num_experts
    return config.num_experts * (1 - missed**tokens)
