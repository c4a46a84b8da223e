"""Hatch build hook: compile the CPU kernels into the wheel, or into the checkout of an editable install.

Without a C compiler the package is built without them, with a warning: it then computes with numpy or MLX.
`K3_BUILD_CPU=0` leaves them out, `K3_BUILD_CPU=1` makes a failure to build them an error.
"""

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernelsHook(BuildHookInterface):
    """Adds `k3mlx/kernels/libk3cpu.*` to wheels and gives them the tag of this platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build for the target `wheel` (standard or editable); the sdist carries sources only."""
        wish = os.environ.get("K3_BUILD_CPU", "")
        if self.target_name != "wheel" or wish == "0":
            return
        cpu_build = _load(Path(self.root) / "k3mlx" / "kernels" / "cpu_build.py")
        try:
            library = cpu_build.build()
        except cpu_build.BuildError as error:
            if wish == "1":
                raise
            self.app.display_warning(f"k3mlx is built without its CPU kernels: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = f"k3mlx/kernels/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform_tag()}"


def _platform_tag() -> str:
    """This platform as a wheel names it: linux_x86_64, macosx_14_0_arm64 (MACOSX_DEPLOYMENT_TARGET is heeded)."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_build", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
