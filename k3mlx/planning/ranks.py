"""Several equal machines with one model: what each keeps, reads and sends, and how fast they would be together.

Owns the messages of a layer on paper (`traffic`), the busiest rank's share of a token's experts, and the estimate. What
a rank has is `k3mlx.ranks.part`'s rule. The same link between all, a ring: every message passes N - 1 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import factorial
from typing import Any

import numpy as np

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.config import ModelConfig
from k3mlx.errors import ResourceError
from k3mlx.governor import MemoryPlan, plan_memory, smallest_memory
from k3mlx.needs import Needs, backend_needs, experts_only
from k3mlx.ranks.part import Part, divide

from .hits import hit_rates
from .ledger import token_bytes
from .machines import Mac
from .plan import ABOUT, METAL, NOTHING, PROMPT_TOKENS, mac_budget, model_needs
from .source import Source
from .speed import MAC, Host, Range, decode, prompt

RANKS_MAX = 64
Pair = tuple[Needs, Needs]  # of rank 0 and of any other
FLOAT = 4  # bytes of a number on the way, whatever dtype is computed in


@dataclass(frozen=True)
class Link:
    """Between two neighbours: bytes a second, and seconds before the first byte of a message."""

    rate: float
    latency: float


@dataclass(frozen=True)
class Traffic:
    """What one rank tells each other one in a pass: messages, numbers that do not depend on the pass, numbers a token.

    messages and per_token of one layer with experts; the totals of all layers and the head.
    """

    layer_messages: int
    layer_floats: int
    messages: int
    per_token: int
    per_pass: int

    def bytes_in(self, tokens: int) -> int:
        """Sent to each other rank in a pass of so many tokens, logits of the last one wanted."""
        return FLOAT * (tokens * self.per_token + self.per_pass)

    def seconds(self, tokens: int, size: int, link: Link) -> float:
        """Of a pass, nothing of it hidden behind work."""
        return (size - 1) * (self.messages * link.latency + self.bytes_in(tokens) / link.rate)


@dataclass(frozen=True)
class Rank:
    """The plan of one rank. hits: of the experts that it has to find."""

    plan: MemoryPlan
    slots: float
    hits: Range
    dense: int

    def report(self) -> dict[str, Any]:
        return {
            "memory": self.plan.report(),
            "dense_bytes": self.dense,
            "slots_per_layer": round(self.slots, 2),
            "hit_rate": list(self.hits),
        }


@dataclass(frozen=True)
class RanksCase:
    """`size` machines with one format; ranks are rank 0 and any other, None where one of them does not fit."""

    machine: str
    size: int
    dense_parallel: bool
    format: str
    budget: int
    smallest: int
    ranks: tuple[Rank, Rank] | None = None
    bytes_per_token: Range = NOTHING  # that the busiest rank reads
    link_seconds: float = 0.0  # of a token
    tokens_per_second: Range = NOTHING
    prompt_seconds: Range = NOTHING

    def report(self) -> dict[str, Any]:
        """As plain values."""
        fields = asdict(replace(self, ranks=None))
        fields["fits"] = self.ranks is not None
        fields["ranks"] = None if self.ranks is None else [rank.report() for rank in self.ranks]
        return fields


@dataclass(frozen=True)
class RanksOutlook:
    """All cases for one number of machines; traffic with and without split dense weights."""

    size: int
    link: Link
    busiest: float
    owned_bytes_per_token: int
    traffic: dict[bool, Traffic]
    cases: tuple[RanksCase, ...]

    def report(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "ranks": self.size,
            "link_bytes_per_second": self.link.rate,
            "link_latency_seconds": self.link.latency,
            "experts_of_busiest_rank": self.busiest,
            "expert_bytes_per_token_and_rank": self.owned_bytes_per_token,
            "traffic": [
                {"dense_parallel": dense, **asdict(t), "bytes_per_token": t.bytes_in(1)}
                for dense, t in self.traffic.items()
            ],
            "cases": [case.report() for case in self.cases],
        }


BASIS = (
    "a layer waits for the rank with most of a token's experts (uniform routing); a rank's hit rate is that of its"
    " share of a cache of all ranks' size; time outside reads is rank 0's, undivided, with --dense-parallel between"
    " that and its share; no message is hidden behind work; every rank is the same machine, with all shards of"
    " the text model on a disk of its own, as a released shard holds a whole layer and each rank a part of every layer"
)


def look_at_ranks(source: Source, size: int, context: int, link: Link, macs: Sequence[Mac]) -> RanksOutlook:
    """Plan `size` machines of each kind, with dense weights on rank 0 and split, the best format of each."""
    config, cases = source.config, []
    needs = {
        dense: {name: _needs(found, size, dense, context) for name, found in source.formats.items()}
        for dense in (False, True)
    }
    for mac in macs:
        for dense, formats in needs.items():
            paper = traffic(config, size, dense)
            tried = [
                _case(name, config, found, mac, size, dense, paper, link) for name, found in formats.items()
            ]
            cases.append(_best(tried))
    return RanksOutlook(
        size,
        link,
        busiest(config.num_experts_per_token, size),
        token_bytes(config) // size,
        {dense: traffic(config, size, dense) for dense in (False, True)},
        tuple(cases),
    )


def traffic(config: ModelConfig, size: int, dense_parallel: bool) -> Traffic:
    """The messages of `k3mlx.ranks`: of a layer with experts latents with ids and weights out and sums back; with split
    dense weights also the layer's input and what attention and MLP add, and at the end the head's input and logits."""
    layers = config.num_hidden_layers
    moe = sum(map(config.is_moe, range(layers)))
    routed = 2 * config.routed_expert_hidden_size + 2 * config.num_experts_per_token
    if not dense_parallel:
        return Traffic(2, routed, 2 * moe, moe * routed, 0)
    stream = 2 * config.hidden_size
    logits = len(divide(config.vocab_size, 0, size))
    return Traffic(
        layer_messages=4,
        layer_floats=routed + 2 * stream,
        messages=4 * layers + 2,
        per_token=moe * routed + 2 * layers * stream,
        per_pass=config.hidden_size + logits,
    )


def busiest(chosen: int, size: int) -> float:
    """Expected share of a token's `chosen` experts on the rank that has most of them, each drawn on its own.

    P(no rank has more than m) = chosen! / size^chosen times the coefficient of x^chosen in (sum_{j<=m} x^j / j!)^size.
    """
    expected = 0.0
    for most in range(chosen):
        terms = np.array([1 / factorial(j) for j in range(most + 1)])
        product = np.ones(1)
        for _ in range(size):
            product = np.convolve(product, terms)[: chosen + 1]
        within = product[chosen] * (factorial(chosen) / size**chosen) if len(product) > chosen else 0.0
        expected += 1 - float(within)
    return expected / chosen


def _best(cases: list[RanksCase]) -> RanksCase:
    """As `plan.best`: the first format, so that with the most bits, that is about as fast as the fastest."""
    fitting = [case for case in cases if case.ranks is not None]
    if not fitting:
        return min(cases, key=lambda case: case.smallest)
    fastest = max(case.tokens_per_second.high for case in fitting)
    return next(case for case in fitting if case.tokens_per_second.high >= ABOUT * fastest)


def _case(
    name: str, config: ModelConfig, needs: Pair, mac: Mac, size: int, dense: bool, paper: Traffic, link: Link
) -> RanksCase:
    budget = mac_budget(mac)
    smallest = max(map(smallest_memory, needs))
    case = RanksCase(mac.name, size, dense, name, budget, smallest)
    try:
        first = plan_memory(needs[0], budget, None)
        other = plan_memory(needs[1], budget, None, first.chunk)
    except ResourceError:
        return case
    ranks = [
        _rank(config, size, plan, rank.expert, rank.dense.total)
        for plan, rank in zip((first, other), needs, strict=True)
    ]
    chunk = min(first.chunk, PROMPT_TOKENS)
    token, sent = paper.seconds(1, size, link), paper.seconds(chunk, size, link) / chunk
    share = busiest(config.num_experts_per_token, size)

    def host(own: Range, link_seconds: float) -> Range:
        return Range(own.low / (size if dense else 1) + link_seconds, own.high + link_seconds)

    working = Host(host(MAC.other, token), host(MAC.arithmetic, sent), MAC.basis)
    speeds, prompts, read = [], [], []
    for rank in ranks:
        streamed = rank.plan.dense_bytes_per_pass
        speeds.append(decode(config, rank.hits, streamed, mac.disk_rate, working, share))
        prompts.append(prompt(config, PROMPT_TOKENS, first.chunk, streamed, mac.disk_rate, working, 1 / size))
        owned = token_bytes(config) / size
        read.append(Range(owned * (1 - rank.hits.high) + streamed, owned * (1 - rank.hits.low) + streamed))
    return replace(
        case,
        ranks=(ranks[0], ranks[1]),
        bytes_per_token=max(read, key=lambda each: each.high),
        link_seconds=token,
        tokens_per_second=min(speeds, key=lambda each: each.low),
        prompt_seconds=max(prompts, key=lambda each: each.high),
    )


def _needs(checkpoint: Checkpoint, size: int, dense: bool, context: int) -> Pair:
    """Of rank 0 and of another one."""
    whole = model_needs(METAL, checkpoint, context)
    owned = -(-whole.experts // size)
    if not dense:
        return replace(whole, experts=owned), replace(experts_only(whole), experts=owned)
    found = []
    for rank in (0, 1):
        part = Part(checkpoint.config, rank, size, checkpoint.quantized)
        needs = backend_needs(METAL, checkpoint, None, context, part=part)
        found.append(replace(needs, process=whole.process, experts=owned))
    return found[0], found[1]


def _rank(config: ModelConfig, size: int, plan: MemoryPlan, expert: int, dense: int) -> Rank:
    moe = len(config.moe_layers)
    slots = plan.cache / expert / moe if moe else 0.0
    return Rank(plan, slots, Range(*hit_rates(size * slots, config.num_experts)), dense)
