"""Perplexity of a text: overlapping windows, each token scored once, resumable after any window.

A window feeds up to `window` ids to a fresh session; the next one begins `stride` ids later and scores only what
no window before it has. The first id of the text is given, never scored. Owns windows, sums and the state file;
tokenising, progress and printing are the command's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .errors import K3Error, UsageError
from .sampling import log_softmax

if TYPE_CHECKING:
    from .engine import Engine

WINDOW = 2048
LOGIT_BYTES = 1 << 28  # float32 logits of a pass, held at once
ROWS = 1 << 22  # logits widened to float64 at once


class Window(NamedTuple):
    """Feeds ids[start:stop] and scores ids[first:stop + 1], the ids that follow."""

    start: int
    first: int
    stop: int


@dataclass
class Sums:
    """What the windows done so far have come to. fed and seconds are of the work, nats and bytes of the text."""

    windows: int = 0
    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    fed: int = 0
    seconds: float = 0.0

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """None for a text of no bytes, which ids of an unknown vocabulary are."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    def figures(self) -> dict[str, Any]:
        """Every figure, for a report."""
        return {
            "nats_per_token": self.nats_per_token,
            "perplexity": math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf,
            "bits_per_byte": self.bits_per_byte,
            "scored_tokens": self.tokens,
            "scored_bytes": self.bytes,
            "windows": self.windows,
            "fed_tokens": self.fed,
            "seconds": self.seconds,
            "tokens_per_second": self.fed / self.seconds if self.seconds else None,
        }


def windows(count: int, window: int, stride: int) -> list[Window]:
    """The windows over `count` ids. Raises UsageError for sizes that leave ids out, or fewer than two ids."""
    if count < 2:
        raise UsageError(
            f"the text is {count} tokens, expected at least 2: the first is given, the others scored"
        )
    if not 1 <= stride <= window:
        raise UsageError(f"window is {window} and stride {stride}, expected 1 <= stride <= window")
    found, first = [], 1
    for start in range(0, count - 1, stride):
        stop = min(start + window, count - 1)
        found.append(Window(start, first, stop))
        first = stop + 1
        if stop == count - 1:
            break
    return found


def perplexity(
    engine: Engine,
    ids: Sequence[int],
    window: int | None = None,
    stride: int | None = None,
    state: str | Path | None = None,
    told: Callable[[int, int, Sums], None] = lambda done, total, sums: None,
) -> Sums:
    """Score ids[1:] given what precedes each within its window.

    window: ids fed at most to one session (default: 2048, or the model's context). stride: ids between two
    windows (default: the window, so that each id is fed once). state: a file with the sums so far, written after
    each window; if it is there, the work goes on from it. told: windows done and to do, and the sums, after each.
    Raises UsageError for sizes, ids or a state that do not fit.
    """
    context = engine.config.max_position_embeddings
    window = min(WINDOW, context) if window is None else window
    if window > context:
        raise UsageError(f"window is {window}, expected at most {context}, the context of this model")
    stride = window if stride is None else stride
    todo = windows(len(ids), window, stride)
    kept = None if state is None else _State(Path(state), _key(engine, ids, window, stride))
    sums = Sums() if kept is None else kept.read()
    sizes = _byte_counts(engine, ids)
    for number in range(sums.windows, len(todo)):
        began, one = perf_counter(), todo[number]
        sums.nats += float(_score(engine, ids, one))
        sums.tokens += one.stop + 1 - one.first
        sums.bytes += sum(sizes[one.first : one.stop + 1])
        sums.fed += one.stop - one.start
        sums.windows += 1
        sums.seconds += perf_counter() - began
        if kept is not None:
            kept.write(sums)
        told(sums.windows, len(todo), sums)
    return sums


def _score(engine: Engine, ids: Sequence[int], window: Window) -> float:
    """Nats of ids[first:stop + 1]; logits are kept of one pass at a time."""
    session = engine.session()
    begin = window.first - 1  # its logits are the first that count
    if begin > window.start:
        session.feed(list(ids[window.start : begin]))
    step = min(engine.prefill_step_size, max(1, LOGIT_BYTES // (4 * engine.config.vocab_size)))
    total = 0.0
    for start in range(begin, window.stop, step):
        stop = min(start + step, window.stop)
        logits = session.feed(list(ids[start:stop]), all_logits=True)
        total += token_nats(logits, ids[start + 1 : stop + 1])
    return total


def token_nats(logits: np.ndarray, targets: Sequence[int]) -> float:
    """The sum of -ln p(target) over rows of logits [T, V]."""
    total, step = 0.0, max(1, ROWS // logits.shape[-1])
    for start in range(0, len(targets), step):
        chosen = np.asarray(targets[start : start + step])
        rows = log_softmax(logits[start : start + step])
        total -= float(rows[np.arange(len(chosen)), chosen].sum())
    return total


def _byte_counts(engine: Engine, ids: Sequence[int]) -> list[int]:
    """Bytes of text of each id; zeros for a model without a vocabulary."""
    if not (engine.folder / "tiktoken.model").exists():
        return [0] * len(ids)
    return [len(engine.tokenizer.token_bytes(id)) for id in ids]


def _key(engine: Engine, ids: Sequence[int], window: int, stride: int) -> str:
    """What a state belongs to: model, backend, dtype, text and windows."""
    text = hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()
    return json.dumps([engine.identity(), text, window, stride])


class _State:
    """The sums in a file, whole at any moment."""

    def __init__(self, path: Path, key: str) -> None:
        if path.is_dir():
            raise UsageError(f"{path} is a folder, expected the name of a file")
        self._path = path
        self._key = key

    def read(self) -> Sums:
        """The sums of the windows done, none if there is no file. Raises UsageError for one of other work."""
        try:
            found = json.loads(self._path.read_text("utf-8"))
            key, sums = found["key"], Sums(**found["sums"])
        except FileNotFoundError:
            return Sums()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{self._path} is no state of k3mlx perplexity ({error}); give another file"
            ) from None
        if key != self._key:
            raise UsageError(
                f"{self._path} belongs to another model, backend, dtype, text, window or stride; give another file"
            )
        return sums

    def write(self, sums: Sums) -> None:
        beside = self._path.with_name(self._path.name + ".part")
        try:
            beside.write_text(json.dumps({"key": self._key, "sums": asdict(sums)}) + "\n", encoding="utf-8")
            os.replace(beside, self._path)
        except OSError as error:
            raise K3Error(f"{self._path}: cannot be written ({error.strerror or error})") from None
