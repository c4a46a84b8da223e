"""Named intermediates of a forward pass: how a stage is shown to whoever looks into the model.

The models call `x = probe("stage", x)` at each; a probe may return something else to go on with. What the
names are is the models' business, who looks is the caller's (`reference.model.Hooks`).
"""

from collections.abc import Callable
from typing import Any

Probe = Callable[[str, Any], Any]  # sees (stage, array), returns what to go on with


def no_probe(stage: str, array: Any) -> Any:
    """The probe of a pass that nobody looks into."""
    return array


def prefixed(probe: Probe, prefix: str) -> Probe:
    """A probe for a part of the model, whose stages have names of their own."""
    return probe if probe is no_probe else lambda stage, array: probe(prefix + stage, array)
