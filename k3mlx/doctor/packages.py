"""The Python packages: what this one requires, mlx and its devices, the threads of numpy's BLAS, settings.

Owns these facts and what is wrong with them. Which backend is used is decided by `k3mlx.devices`, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from k3mlx import __version__
from k3mlx.devices import MLX_BELOW, MLX_FROM, Choice, choose, import_mlx
from k3mlx.errors import ResourceError, UsageError

from .findings import Finding, fatal, ok, warning

SETTINGS = ("K3_", "HF_", "MLX_", "OMP_", "OPENBLAS_", "XDG_CACHE_HOME")  # how the names begin
SECRET = ("TOKEN", "KEY", "PASSWORD")


@dataclass(frozen=True)
class Package:
    """One requirement: the versions that it wants, the one that is there, and why it cannot be imported."""

    name: str
    wanted: str
    version: str | None
    fits: bool
    error: str = ""


@dataclass(frozen=True)
class Blas:
    """One pool of threads in this process, as threadpoolctl names it."""

    name: str
    version: str
    threads: int
    file: str


def look_at_packages() -> list[Package] | None:
    """What is required here without extras, None when this package is not installed (a bare checkout).

    Not mlx, without which numpy computes."""
    from packaging.requirements import Requirement

    try:
        texts = requires("k3mlx") or []
    except PackageNotFoundError:
        return None
    wanted = [requirement for requirement in map(Requirement, texts) if _applies(requirement)]
    return [
        _look_at_package(
            r.name, str(r.specifier), r.specifier.contains, partial(import_module, r.name.replace("-", "_"))
        )
        for r in wanted
    ]


def check_packages(packages: Sequence[Package] | None) -> Iterator[Finding]:
    """A line for this package and those that it needs; a fatal one for each that is missing or does not fit."""
    if packages is None:
        yield ok(
            "packages", f"k3mlx {__version__} from a checkout that is not installed; requirements unknown"
        )
        return
    usable = [package for package in packages if not _wrong(package)]
    versions = ", ".join(f"{package.name} {package.version}" for package in usable)
    yield ok("packages", f"k3mlx {__version__}; {versions}")
    for package in packages:
        what = _wrong(package)
        if what:
            remedy = f"pip install --upgrade '{package.name}{package.wanted}'"
            yield fatal(
                "package", f"{package.name} {what}, expected {package.wanted or 'any version'}", remedy
            )


def check_mlx(found: Package, device_info: Mapping[str, Any] | None, platform: str) -> Finding:
    """mlx is optional: a warning where it would bring a GPU into use and is not there."""
    if found.version is None:
        if platform == "darwin":
            return warning("mlx", "mlx is not installed: no GPU is used", f"pip install 'mlx{found.wanted}'")
        return ok("mlx", "mlx is not installed; only --backend mlx needs it (pip install 'k3mlx[mlx]')")
    what = _wrong(found)
    if what:
        remedy = f"pip install --upgrade 'mlx{found.wanted}'"
        return warning("mlx", f"mlx {what}, expected {found.wanted}", remedy)
    name = (device_info or {}).get("device_name")
    details = [f"{key}: {value}" for key, value in (device_info or {}).items()]
    return ok("mlx", f"mlx {found.version}{f', {name}' if name else ''}", details)


def check_blas(pools: Sequence[Blas], cores: int) -> Finding:
    """The pools of BLAS threads; more threads than cores wait for one another."""
    if not pools:
        return ok("blas", "no BLAS thread pool to be seen (Accelerate on macOS keeps its own)")
    text = ", ".join(f"{p.name} {p.version}, {p.threads} thread{'s' * (p.threads != 1)}" for p in pools)
    files = [pool.file for pool in pools]
    if any(pool.threads > cores for pool in pools):
        remedy = f"set OMP_NUM_THREADS={cores}"
        return warning("blas", f"{text}, on {cores} core{'s' * (cores != 1)}", remedy, files)
    return ok("blas", text, files)


def check_settings(environment: Mapping[str, str], read: Sequence[Callable[[], object]]) -> Iterator[Finding]:
    """The environment variables that count, none of them secret; `read` are what raises UsageError for bad ones."""
    names = sorted(name for name in environment if name.startswith(SETTINGS))
    shown = [f"{n}={'(set)' if any(s in n for s in SECRET) else environment[n]}" for n in names]
    yield ok("settings", ", ".join(shown) or "no K3_, HF_, MLX_ or OMP_ variable is set")
    for reader in read:
        try:
            reader()
        except UsageError as error:
            yield fatal("setting", str(error), "correct or unset the variable")


def check_choice(
    backend: str, device: str, chooser: Callable[[str, str], Choice] = choose
) -> tuple[Choice | None, Finding]:
    """Backend and device as the engine would choose them, None when what was asked for is not here."""
    try:
        choice = chooser(backend, device)
    except UsageError as error:
        return None, fatal("device-setting", str(error), "correct or unset the variable")
    except ResourceError as error:
        return None, fatal("device", str(error), "leave out --backend and --device, or use --device cpu")
    return choice, ok("device", "; ".join((f"{choice.backend} on {choice.device}", *choice.notes)))


def look_at_mlx() -> Package:
    """The mlx that is installed, against the versions that this package was made for."""
    from packaging.specifiers import SpecifierSet

    first, below = (".".join(map(str, numbers)) for numbers in (MLX_FROM, MLX_BELOW))
    specifier = SpecifierSet(f">={first},<{below}")
    return _look_at_package("mlx", f">={first},<{below}", specifier.contains, import_mlx)


def mlx_device_info() -> dict[str, Any] | None:
    """What mlx says of its default device, None where it says nothing."""
    try:
        info = import_mlx().device_info()
    except (ResourceError, RuntimeError, AttributeError):
        return None
    return info if isinstance(info, dict) else None


def look_at_blas() -> list[Blas]:
    """The thread pools of the BLAS that numpy has loaded."""
    import_module("numpy")
    from threadpoolctl import threadpool_info

    return [
        Blas(pool["internal_api"], pool.get("version") or "", pool["num_threads"], pool["filepath"])
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]


def setting_readers() -> list[Callable[[], object]]:
    """What reads and checks environment variables in a run."""
    from k3mlx.experts.options import expert_cache_from_environment, stream_options

    return [stream_options, expert_cache_from_environment]


def _wrong(package: Package) -> str:
    if package.version is None:
        return "is missing"
    if not package.fits:
        return f"is {package.version}"
    return f"{package.version} cannot be imported ({package.error})" if package.error else ""


def _applies(requirement: Any) -> bool:
    here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return bool(here) and requirement.name != "mlx"


def _look_at_package(
    name: str, wanted: str, fits: Callable[..., bool], load: Callable[[], object]
) -> Package:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Package(name, wanted, None, False)
    suits = fits(found, prereleases=True)
    try:
        load()
    except Exception as error:  # a broken binary raises anything
        why = str(error).strip().splitlines()
        return Package(name, wanted, found, suits, why[0] if why else repr(error))
    return Package(name, wanted, found, suits)
