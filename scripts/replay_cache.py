"""Replay traces of routing against every cache policy and the optimum, for a range of budgets.

    python scripts/replay_cache.py --synthetic 6 TRACE ...

TRACE is a file of `--expert-trace`. Prints the share of experts found in memory, a line for each trace and
budget; `--plot FILE` draws it (needs matplotlib). Knows nothing of time or bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3mlx.experts.policies import POLICIES, Key, Policy, belady_misses
from k3mlx.experts.trace import Routing, read_trace

SHARES = (0.02, 0.05, 0.1, 0.25, 0.5)  # budgets, as shares of all experts
OPTIMUM = "belady"


class Trace(NamedTuple):
    """A run: what each layer chose in each pass, of so many experts a layer."""

    name: str
    experts: int
    routings: list[Routing]

    @property
    def total(self) -> int:
        """All experts of the layers that occur."""
        return self.experts * len({routing.layer for routing in self.routings})


class Habits(NamedTuple):
    """How the synthetic router chooses an expert: again, again from the token before, from the topic, or any.

    Shares of the first three; `pool` is how many experts a topic has in a layer, `drift` the share of them
    that each token replaces, `skew` the exponent of their popularity.
    """

    again: float
    before: float
    topic: float
    pool: int
    drift: float
    skew: float


# Fitted so that a token's set holds 30 to 36 % of the next one's, the last two sets 45 %, and the 16 most
# frequent experts of a layer 20 % of its choices.
HABITS = (
    Habits(0.265, 0.12, 0.27, 96, 0.01, 0.76),
    Habits(0.265, 0.11, 0.22, 64, 0.02, 0.73),
    Habits(0.275, 0.12, 0.18, 128, 0.02, 0.75),
    Habits(0.265, 0.12, 0.34, 160, 0.01, 0.78),
    Habits(0.27, 0.12, 0.15, 64, 0.05, 0.74),
    Habits(0.265, 0.10, 0.32, 128, 0.03, 0.75),
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--synthetic", type=int, default=0, metavar="N", help="traces made here, K3's sizes")
    parser.add_argument("--layers", type=int, default=8, help="of a synthetic trace")
    parser.add_argument("--tokens", type=int, default=400, help="of a synthetic trace")
    parser.add_argument("--experts", type=int, default=896, help="in a layer of a synthetic trace")
    parser.add_argument("--budgets", type=float, nargs="+", default=SHARES, metavar="SHARE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    traces = [load(path) for path in args.traces]
    for number in range(args.synthetic):
        traces.append(synthetic(number, args.layers, args.tokens, args.experts))
    if not traces:
        parser.error("no traces: give files, or --synthetic N")
    rows = []
    print(f"{'trace':24} {'budget':>7} " + " ".join(f"{name:>8}" for name in (*POLICIES, OPTIMUM)))
    for trace in traces:
        print(f"# {trace.name}: {describe(trace)}", file=sys.stderr)
        for share in args.budgets:
            rates = hit_rates(trace, share)
            rows.append((trace.name, share, rates))
            cells = " ".join(f"{rates[name]:8.4f}" for name in (*POLICIES, OPTIMUM))
            print(f"{trace.name:24} {share:7.2%} {cells}", flush=True)
    for policy in POLICIES:
        worst = min(rates[policy] - rates["lru"] for _, _, rates in rows)
        mean = np.mean([rates[policy] for _, _, rates in rows])
        print(f"{policy:8} mean {mean:.4f}, at worst {worst:+.4f} against lru")
    if args.plot:
        draw(rows, args.plot)


def load(path: Path) -> Trace:
    """A recorded trace. Raises ModelFilesError."""
    sizes, routings = read_trace(path)
    return Trace(path.stem, sizes["experts"], list(routings))


def hit_rates(trace: Trace, share: float) -> dict[str, float]:
    """The share of experts found in memory with each policy and the optimum, at a share of all experts."""
    least = max(len(np.unique(routing.ids[0])) for routing in trace.routings)
    capacity = max(least, int(share * trace.total))
    accesses = list(_accesses(trace.routings))
    count = sum(len(batch) for batch in accesses)
    rates = {name: 1 - _misses(make(capacity), accesses, capacity) / count for name, make in POLICIES.items()}
    rates[OPTIMUM] = 1 - belady_misses((key for batch in accesses for key in batch), capacity) / count
    return rates


def _accesses(routings: Iterable[Routing]) -> Iterator[list[Key]]:
    """The experts that a layer asks for at once, as the store asks for them."""
    for routing in routings:
        yield [(routing.layer, int(expert)) for expert in np.unique(routing.ids)]


def _misses(policy: Policy, accesses: Sequence[list[Key]], capacity: int) -> int:
    resident: set[Key] = set()
    misses = 0
    for batch in accesses:
        needed = set(batch)
        for key in batch:
            if key in resident:
                policy.touch(key)
        for key in batch:
            if key in resident:
                continue
            misses += 1
            if len(resident) >= capacity:
                victim = policy.victim(_outside(needed)) or policy.victim(_outside({key}))
                assert victim is not None, "a cache holds at least one token's experts"
                policy.remove(victim)
                resident.remove(victim)
            policy.insert(key)
            resident.add(key)
    return misses


def _outside(keys: set[Key]) -> Callable[[Key], bool]:
    return lambda key: key not in keys


def synthetic(seed: int, layers: int = 8, tokens: int = 400, experts: int = 896, chosen: int = 16) -> Trace:
    """A trace with the locality that has been published for the released model."""
    habits = HABITS[seed % len(HABITS)]
    rng = np.random.default_rng(1000 + seed)
    routers = [_Router(habits, experts, chosen, rng) for _ in range(layers)]
    routings = [
        Routing(layer, router.choose()[None])
        for _ in range(tokens)
        for layer, router in enumerate(routers, 1)
    ]
    return Trace(f"synthetic-{seed}", experts, routings)


class _Router:
    """Chooses one layer's experts for one token after another."""

    def __init__(self, habits: Habits, experts: int, chosen: int, rng: np.random.Generator) -> None:
        self._habits, self._experts, self._chosen, self._rng = habits, experts, chosen, rng
        popularity = np.arange(1, experts + 1) ** -habits.skew
        self._popularity = rng.permutation(popularity / popularity.sum())
        self._pool = self._popular(min(habits.pool, experts))
        self._last = self._popular(chosen)
        self._before = self._popular(chosen)

    def choose(self) -> NDArray[np.intp]:
        habits, rng = self._habits, self._rng
        replaced = rng.random(len(self._pool)) < habits.drift
        self._pool[replaced] = self._popular(int(replaced.sum()))
        picked: dict[int, None] = {}
        while len(picked) < self._chosen:
            draw = rng.random()
            if draw < habits.again:
                source = self._last
            elif draw < habits.again + habits.before:
                source = self._before
            elif draw < habits.again + habits.before + habits.topic:
                source = self._pool
            else:
                source = self._popular(1)
            picked[int(rng.choice(source))] = None
        self._before, self._last = self._last, np.array(list(picked))
        return self._last

    def _popular(self, count: int) -> NDArray[np.intp]:
        return self._rng.choice(self._experts, count, replace=False, p=self._popularity)


class Locality(NamedTuple):
    """Shares of a token's experts that the last token chose, one of the last two, and the 16 most frequent."""

    last: float
    last_two: float
    top: float


def locality(trace: Trace, top: int = 16) -> Locality:
    """What the published figures are about, of single tokens of one layer after another."""
    by_layer: dict[int, list[set[int]]] = {}
    for routing in trace.routings:
        by_layer.setdefault(routing.layer, []).extend(set(row.tolist()) for row in routing.ids)
    last, two, popular = [], [], []
    for sets in by_layer.values():
        counts: dict[int, int] = {}
        for chosen in sets:
            for expert in chosen:
                counts[expert] = counts.get(expert, 0) + 1
        popular.append(sum(sorted(counts.values(), reverse=True)[:top]) / sum(counts.values()))
        for older, old, new in zip(sets, sets[1:], sets[2:], strict=False):
            last.append(len(new & old) / len(new))
            two.append(len(new & (old | older)) / len(new))
    return Locality(float(np.mean(last or [0])), float(np.mean(two or [0])), float(np.mean(popular)))


def describe(trace: Trace) -> str:
    last, two, top = locality(trace)
    return (
        f"{len(trace.routings)} routings of {trace.total} experts; the last token's set holds {last:.0%},"
        f" the last two {two:.0%}, the 16 most frequent {top:.0%}"
    )


def draw(rows: list[tuple[str, float, dict[str, float]]], path: Path) -> None:
    """Hit rate over budget, a panel for each trace."""
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for name, _, _ in rows))
    columns = min(4, len(names))
    height = -(-len(names) // columns)
    figure, axes = pyplot.subplots(height, columns, squeeze=False, figsize=(4 * columns, 3 * height))
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for axis, name in zip(axes.flat, names, strict=False):
        mine = [(share, rates) for trace, share, rates in rows if trace == name]
        for policy, style in zip(
            (*POLICIES, OPTIMUM), ("o-", "x--", "s:", "k-"), strict=True
        ):  # lines may coincide
            axis.plot(
                [100 * s for s, _ in mine],
                [r[policy] for _, r in mine],
                style,
                label=policy,
                fillstyle="none",
            )
        axis.set(title=name, xlabel="% of experts in memory", ylabel="hit rate", ylim=(0, 1), xscale="log")
        budgets = sorted({100 * share for share, _ in mine})
        axis.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        axis.set_xticks([], minor=True)
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
