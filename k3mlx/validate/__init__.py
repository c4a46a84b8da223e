"""Two ways through one model, compared layer by layer and stage by stage: see `run.validate`."""

from .path import PathSpec, parse_spec
from .run import Options, Report, validate

__all__ = ["Options", "PathSpec", "Report", "parse_spec", "validate"]
