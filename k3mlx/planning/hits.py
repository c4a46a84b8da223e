"""How many of a token's experts will be found in memory: a range, and what it is based on.

No trace of the released model is at hand. The curves are those of least-recently-used and of the optimum (Belady) on
six synthetic traces with the published locality (a token's set holds a third of the next one's, the last two 45 %),
made by `python scripts/replay_cache.py --synthetic 6 --layers 8 --tokens 300`.
"""

from __future__ import annotations

import numpy as np

BASIS = (
    "LRU on six synthetic traces with the published locality; low: twice their misses, as when the topic changes;"
    " high: theirs, or the 45 % that one of the last two tokens chose where the best policy could keep it"
)
LAST_TWO = 0.45  # of a token's experts, one of the two tokens before chose
LEAST_SLOTS = 6  # in a layer; with fewer no policy finds much (published, and the curves below)
ALL_AGAIN = 2.0  # times the misses of the traces

# share of experts in memory; hit rate of LRU, worst and best trace; of the optimum, worst trace
_CURVES = np.array(
    [
        (0.0000, 0.000, 0.000, 0.000),
        (0.0080, 0.000, 0.000, 0.371),
        (0.0112, 0.000, 0.000, 0.447),
        (0.0140, 0.000, 0.000, 0.487),
        (0.0156, 0.000, 0.000, 0.504),
        (0.0179, 0.333, 0.336, 0.525),
        (0.0220, 0.333, 0.336, 0.554),
        (0.0300, 0.431, 0.441, 0.594),
        (0.0400, 0.463, 0.479, 0.629),
        (0.0500, 0.485, 0.509, 0.655),
        (0.0700, 0.521, 0.553, 0.691),
        (0.1000, 0.568, 0.613, 0.730),
        (0.1500, 0.624, 0.690, 0.769),
        (0.2500, 0.699, 0.785, 0.815),
        (0.4000, 0.770, 0.842, 0.844),
        (0.6000, 0.826, 0.867, 0.848),
        (1.0000, 1.000, 1.000, 1.000),
    ]
)


def hit_rates(slots: float, experts: int) -> tuple[float, float]:
    """Expected hit rate, low and high, of a cache with `slots` of a layer's `experts` in memory."""
    if slots >= experts:
        return 1.0, 1.0
    if slots < LEAST_SLOTS:
        return 0.0, 0.0
    worst, best, optimum = (
        float(np.interp(slots / experts, _CURVES[:, 0], _CURVES[:, n])) for n in (1, 2, 3)
    )
    return max(0.0, 1 - ALL_AGAIN * (1 - worst)), max(best, min(LAST_TWO, optimum))
