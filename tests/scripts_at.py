"""Scripts of the repository as modules: they are no package."""

import importlib.util
from types import ModuleType

from tests.paths import ROOT


def script(name: str) -> ModuleType:
    """`scripts/NAME.py`, imported anew."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
