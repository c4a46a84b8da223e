"""`route_topk` on the emulator over its sizes: no finding, and the reference's results within tolerance."""

from __future__ import annotations

import pytest

from k3mlx.kernels.cases import Case

from .emulated import needs_emulator, prove
from .sizes import route_topk_cases

pytestmark = needs_emulator


@pytest.mark.parametrize(
    "case", list(route_topk_cases()), ids=lambda c: f"{c.label}-{c.dtype}-{c.threads}".replace(" ", "-")
)
def test_against_the_reference(case: Case) -> None:
    prove(case)
