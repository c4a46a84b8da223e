"""Where the tests find the released data and the golden captures, which are not part of the package."""

import os
from pathlib import Path

import pytest

import k3mlx

ROOT = Path(__file__).resolve().parents[1]
NANO = Path(k3mlx.__file__).parent / "models" / "k3-nano"  # the small model of the package
TEST_DATA = Path(os.environ.get("K3MLX_TEST_DATA", ROOT.parent / "shared")).resolve()
DATA = TEST_DATA / "data"
GOLDEN = TEST_DATA / "golden"

needs_data = pytest.mark.skipif(
    not (DATA / "config.json").is_file(),
    reason=f"released config, index and vocabulary not found in {DATA}; set K3MLX_TEST_DATA to their parent",
)
needs_golden = pytest.mark.skipif(
    not (GOLDEN / "first-party-93-layers").is_dir(),
    reason=f"golden captures not found in {GOLDEN}; set K3MLX_TEST_DATA to their parent",
)
