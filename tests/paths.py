"""Where the tests find the released data and the golden captures, which are not part of the package."""

import os
import runpy
import sys
from pathlib import Path

import pytest

import k3mlx

ROOT = Path(__file__).resolve().parents[1]
NANO = Path(k3mlx.__file__).parent / "models" / "k3-nano"  # the small model of the package
TEST_DATA = Path(os.environ.get("K3MLX_TEST_DATA", ROOT.parent / "shared")).resolve()
DATA = TEST_DATA / "data"
GOLDEN = TEST_DATA / "golden"
GOLDEN_RUN = GOLDEN / "first-party-93-layers"

needs_data = pytest.mark.skipif(
    not (DATA / "config.json").is_file(),
    reason=f"released config, index and vocabulary not found in {DATA}; set K3MLX_TEST_DATA to their parent",
)
needs_golden = pytest.mark.skipif(
    not GOLDEN_RUN.is_dir(),
    reason=f"golden captures not found in {GOLDEN}; set K3MLX_TEST_DATA to their parent",
)


def write_golden(folder: Path) -> Path:
    """The 93-layer checkpoint of the captures, by the script that they were made with."""
    argv, sys.argv = sys.argv, ["make_checkpoint.py", str(folder)]
    try:
        runpy.run_path(str(GOLDEN_RUN / "make_checkpoint.py"), run_name="__main__")
    finally:
        sys.argv = argv
    return folder
