"""How far an overlay's answers are from those of the snapshot it was made from, on a text.

Owns the comparison of next-token distributions; both models compute on numpy in float32, one after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import k3mlx
from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.devices import choose
from k3mlx.errors import ResourceError, UsageError
from k3mlx.governor import plan_memory
from k3mlx.needs import default_needs
from k3mlx.tokenizer import Tokenizer
from k3mlx.validate.agreement import kl_divergence

LOGITS_MAX = 512 << 20  # bytes of logits kept at once; the text is cut to that

TEXT = """The harbour was quiet when the ferry came in. A woman in a grey coat stood at the rail and counted the
lamps along the quay, as she had done every evening since the spring. "Nine," she said, "and yesterday there were ten."
Nobody answered her; the engine stopped, the ropes went over, and the few who had crossed with her went ashore.

To find the mean of a list of numbers, add them and divide the sum by how many there are: for 3, 5 and 10 that is
(3 + 5 + 10) / 3 = 6. The median is the one in the middle when they are sorted, here 5.

def mean(values):
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

Water boils at 100 degrees Celsius at sea level, and at a lower temperature on a mountain, because the air presses less
on its surface. Copy this: "blue harbor". Translate: Guten Morgen, wie geht es Ihnen? 早上好，今天天气很好。
"""


class Agreement(NamedTuple):
    """Of next-token distributions p (original) and q (overlay) after each token but the last.

    kl_mean, kl_max: KL(p || q) in nats. top1: share of positions where both prefer the same token.
    """

    tokens: int
    kl_mean: float
    kl_max: float
    top1: float


def compare(original: Path, overlay: Path, text: str) -> Agreement:
    """Both models on a text, cut to what memory and the context hold.

    Raises ResourceError when the original's weights do not all fit in memory in float32, UsageError for a text of
    fewer than two tokens, ModelFilesError without a vocabulary.
    """
    with open_checkpoint(original) as checkpoint:
        config = checkpoint.config
        plan = plan_memory(default_needs(choose("numpy", "cpu"), checkpoint), None, None)
    if plan.dense_bytes_per_pass:
        raise ResourceError("the original does not fit in memory, so it is not compared on text")
    ids = Tokenizer.load(original, config.vocab_size).encode(text)
    ids = ids[: min(config.max_position_embeddings, LOGITS_MAX // (4 * config.vocab_size))]
    if len(ids) < 2:
        raise UsageError("the text has fewer than two tokens; give a longer one")
    p, q = _logits(original, ids), _logits(overlay, ids)
    divergence = [kl_divergence(a, b) for a, b in zip(p, q, strict=True)]  # a row at a time, in float64
    same = p.argmax(axis=-1) == q.argmax(axis=-1)
    return Agreement(len(p), float(np.mean(divergence)), float(np.max(divergence)), float(same.mean()))


def _logits(folder: Path, ids: list[int]) -> NDArray[np.float32]:
    """After each id [T, V]."""
    with k3mlx.load(folder, backend="numpy", dtype="float32") as engine:
        return engine.session().feed(ids, all_logits=True)
