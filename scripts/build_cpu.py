"""Build the CPU kernels in place: `python scripts/build_cpu.py`.

`pip install` does the same through `scripts/hatch_build.py`; this is for a bare checkout, or after a change of
the C sources. `CC` chooses the compiler.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Build, print where the library is or why there is none; 0 or 1."""
    path = ROOT / "k3mlx" / "kernels" / "cpu_build.py"
    spec = importlib.util.spec_from_file_location("cpu_build", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    cpu_build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cpu_build)
    try:
        print(cpu_build.build())
    except cpu_build.BuildError as error:
        print(f"build_cpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
