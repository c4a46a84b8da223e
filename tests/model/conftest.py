"""Everything here needs mlx; without it the whole folder is skipped, saying so."""

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'k3mlx[mlx]'")
