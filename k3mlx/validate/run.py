"""A prompt through two paths, a layer at a time, with one layer's dense weights in memory at most.

Each layer of the tried path runs twice. Once every stage is fed with the other path's results of the stages before
it, rounded to its own dtype: then the error of a stage is the stage's own, small tolerances hold at any depth, and
the stage that is wrong is named and no other. And once on its own stream from the first layer on: that gives the
drift by depth, and the logits that are compared at the end. Router choices that differ at a tie do no harm to the
first kind, as the other path's experts are used, and are part of the second.

Owns the walk and its report. How a path runs is in `path.py`, what is wrong in `compare.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3mlx.errors import UsageError
from k3mlx.reference.model import Hooks

from .agreement import Agreement, agreement
from .compare import StageResult, compare, tolerance_for
from .path import Path, Stream
from .watch import LayerWatch, stage_filter

DECODED = 2  # tokens at the end of the prompt that are fed one at a time, unless told otherwise


@dataclass(frozen=True)
class Options:
    """layer: the one to compare, None for all and for the logits. token: the one position to compare, None for all.
    stages: comma-separated patterns. decode: how many tokens at the end are fed one at a time. tolerance: in place
    of that of the dtypes."""

    layer: int | None = None
    token: int | None = None
    stages: str | None = None
    decode: int = DECODED
    tolerance: float | None = None


@dataclass(frozen=True)
class LayerReport:
    """layer is None for the embedding and for the head. drift: |got - expected| / |expected| of the tried path's own
    stream behind the layer; rerouted: tokens that took other experts there."""

    layer: int | None
    kind: str
    stages: list[StageResult]
    drift: float | None = None
    rerouted: int | None = None

    @property
    def worst(self) -> StageResult | None:
        return max(self.stages, key=lambda stage: stage.excess, default=None)


@dataclass
class Report:
    """What `validate` found."""

    expected: str
    got: str
    tokens: int
    pieces: list[int]
    layers: list[LayerReport] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    agreement: Agreement | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stages(self) -> list[StageResult]:
        return [stage for layer in self.layers for stage in layer.stages]

    @property
    def first(self) -> StageResult | None:
        """The first stage that left its tolerance."""
        return next((stage for stage in self.stages if not stage.ok), None)

    @property
    def passed(self) -> bool:
        return self.first is None and (self.agreement is None or self.agreement.ok)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every figure, plain types."""
        found = asdict(self)
        for layer, shown in zip(self.layers, found["layers"], strict=True):
            for stage, entry in zip(layer.stages, shown["stages"], strict=True):
                entry["ok"] = stage.ok
        if self.agreement is not None:
            for one, entry in zip(self.agreement.divergences, found["agreement"]["divergences"], strict=True):
                entry["near_tie"] = one.near_tie
        first = self.first
        plain: dict[str, Any] = _plain(
            {"passed": bool(self.passed), "first": first and asdict(first), **found}
        )
        return plain


def validate(
    reference: Path,
    tried: Path,
    ids: Sequence[int],
    options: Options | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Compare `tried` with `reference` on a prompt. `progress` is told layers done and to do.

    Raises UsageError for a prompt, layer or token that there is not, or for stages that match nothing.
    """
    walk = _Walk(reference, tried, list(ids), options or Options())
    return walk.run(progress)


class _Walk:
    def __init__(self, reference: Path, tried: Path, ids: list[int], options: Options) -> None:
        _check(reference, tried, ids, options)
        self.reference, self.tried, self.options = reference, tried, options
        self.pieces = _pieces(ids, options.decode)
        self.starts = [sum(map(len, self.pieces[:n])) for n in range(len(self.pieces))]
        self.tolerance = tolerance_for((reference.dtype, tried.dtype), options.tolerance)
        self.wanted = stage_filter(options.stages)
        self.report = Report(reference.name, tried.name, len(ids), list(map(len, self.pieces)))
        self.whole = options.layer is None
        self.right = [reference.embed(piece) for piece in self.pieces]  # streams of the reference
        self.own = [tried.embed(piece) for piece in self.pieces] if self.whole else []

    def run(self, progress: Callable[[int, int], None]) -> Report:
        config, chosen = self.reference.config, self.options.layer
        total = config.num_hidden_layers if chosen is None else chosen + 1
        if self.whole:
            self._embedding()
        for layer in range(total):
            progress(layer, total)
            self._layer(layer, chosen in (None, layer))
        if self.whole:
            self._head()
        progress(total, total)
        if not self.report.stages:
            raise UsageError(f"no stage matches {self.options.stages}; --json lists the names of them all")
        self.report.parts = self.tried.parts()
        return self.report

    def _embedding(self) -> None:
        results = []
        for start, right, own in zip(self.starts, self.right, self.own, strict=True):
            rows = [path.to_host(stream)[1] for path, stream in ((self.reference, right), (self.tried, own))]
            results.append(compare(None, "embedding", rows[1], rows[0], self.tolerance, start))
        if self.wanted("embedding"):
            worst = max(results, key=lambda result: result.excess)
            self.report.layers.append(LayerReport(None, "embedding", [worst]))

    def _layer(self, layer: int, compared: bool) -> None:
        config = self.reference.config
        bias = self.reference.router_bias(layer) if config.is_moe(layer) else None
        watch = LayerWatch(layer, self.tolerance, self.wanted, self.options.token, bias)
        states = [self.reference.state(layer), self.tried.state(layer), self.tried.state(layer)]
        rerouted, drift = 0, _Drift()
        for n, start in enumerate(self.starts):
            watch.begin(start, len(self.pieces[n]))
            before = self.right[n]
            hooks = Hooks(probe=watch.keep)
            self.right[n], states[0] = self.reference.layer(layer, before, states[0], hooks)
            if compared:
                fed = self.tried.from_host(self.reference.to_host(before))
                hooks = Hooks(probe=watch.judge, inject=watch.expected)
                _, states[1] = self.tried.layer(layer, fed, states[1], hooks)
            if self.whole:
                ids = _Ids(layer)
                self.own[n], states[2] = self.tried.layer(layer, self.own[n], states[2], Hooks(probe=ids))
                rerouted += ids.differ(watch.expected)
                drift.add(self.reference.to_host(self.right[n])[1], self.tried.to_host(self.own[n])[1])
        if compared:
            self.report.unseen += [name for name in watch.unseen() if name not in self.report.unseen]
            self.report.layers.append(
                LayerReport(
                    layer, config.layer_kinds[layer], watch.results(),
                    drift.value if self.whole else None, rerouted if self.whole else None,
                )
            )  # fmt: skip

    def _head(self) -> None:
        watch = LayerWatch(None, self.tolerance, self.wanted, self.options.token)
        watch.begin(0, self.report.tokens)
        right = _joined([self.reference.to_host(stream) for stream in self.right])
        expected = self.reference.head(self.reference.from_host(right), Hooks(probe=watch.keep))
        fed = self.tried.from_host(right)
        self.tried.head(fed, Hooks(probe=watch.judge, inject=watch.expected))
        if watch.results():
            self.report.layers.append(LayerReport(None, "head", watch.results()))
        own = self.tried.from_host(_joined([self.tried.to_host(stream) for stream in self.own]))
        self.report.agreement = agreement(expected, self.tried.head(own, Hooks()))


def _plain(value: Any) -> Any:
    """With what JSON has no numbers for, NaN and infinities, as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


class _Drift:
    """|got - expected| / |expected| over all tokens."""

    def __init__(self) -> None:
        self._error = self._size = 0.0

    def add(self, expected: NDArray, got: NDArray) -> None:
        expected, got = expected.astype(np.float64), got.astype(np.float64)
        self._error += float(np.square(got - expected).sum())
        self._size += float(np.square(expected).sum())

    @property
    def value(self) -> float:
        return float(np.sqrt(self._error / self._size)) if self._size else float(self._error > 0)


class _Ids:
    """A probe that keeps what a router chose."""

    def __init__(self, layer: int) -> None:
        self._stage = f"layers.{layer}.moe.ids"
        self._ids: NDArray[Any] | None = None

    def __call__(self, stage: str, array: NDArray[Any]) -> None:
        if stage == self._stage:
            self._ids = np.sort(array, axis=-1)

    def differ(self, expected: dict[str, NDArray[Any]]) -> int:
        """Tokens for which another path chose other experts."""
        if self._ids is None:
            return 0
        return int((self._ids != np.sort(expected[self._stage], axis=-1)).any(axis=-1).sum())


def _pieces(ids: list[int], decode: int) -> list[list[int]]:
    """The prompt in one piece but for its last tokens, which come alone."""
    alone = min(decode, len(ids) - 1)
    return [ids[: len(ids) - alone], *([id] for id in ids[len(ids) - alone :])]


def _joined(streams: list[Stream]) -> Stream:
    blocks = [np.concatenate(parts) for parts in zip(*(blocks for blocks, _ in streams), strict=True)]
    return blocks, np.concatenate([partial for _, partial in streams])


def _check(reference: Path, tried: Path, ids: list[int], options: Options) -> None:
    config = reference.config
    if (
        tried.config.num_hidden_layers != config.num_hidden_layers
        or tried.config.vocab_size != config.vocab_size
    ):
        raise UsageError("the two paths go through models of different sizes: they cannot be compared")
    if not ids or min(ids) < 0 or max(ids) >= config.vocab_size:
        raise UsageError(f"the prompt is {len(ids)} ids; expected some from 0 to {config.vocab_size - 1}")
    if options.layer is not None and not 0 <= options.layer < config.num_hidden_layers:
        raise UsageError(f"layer is {options.layer}, expected 0 to {config.num_hidden_layers - 1}")
    if options.token is not None and not 0 <= options.token < len(ids):
        raise UsageError(f"token is {options.token}, expected 0 to {len(ids) - 1}")
    if options.decode < 0:
        raise UsageError(f"decode is {options.decode}, expected at least 0")
