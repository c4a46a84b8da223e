"""Everything here needs mlx; without it every file is skipped, saying so."""

from importlib.util import find_spec

import pytest


class WithoutMlx(pytest.Module):
    """A test file that cannot be imported here."""

    def collect(self):
        pytest.skip("mlx is not installed: pip install 'k3mlx[mlx]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if find_spec("mlx") is None:
        return WithoutMlx.from_parent(parent, path=module_path)
    return None
