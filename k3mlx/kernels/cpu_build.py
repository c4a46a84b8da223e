"""Compiles the CPU kernels (custom_kernels/cpu) into the shared library that `cpu.py` loads.

Owns sources, compiler flags and the place of the library; imports nothing of the package, so that the build
hook can run it before the package exists. Every file is compiled for the plain architecture except `kernels.c`,
once more for each instruction set with that set's flags: the choice is made when the library runs.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / ("libk3cpu.dylib" if sys.platform == "darwin" else "libk3cpu.so")

# No -march=native and no fast-math: one library for every machine of its architecture, IEEE arithmetic throughout.
# Floating-point exceptions and errno are not looked at, which lets the compiler vectorise selects.
FLAGS = [
    *("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
PLAIN_UNITS = ("api", "sequence", "pool", "tables")
PORTABLE_FLAGS = [
    "-O2"
]  # 4-bit formats twice as fast as with -O3, compiled in a third of the time; bf16 slower
_AVX512 = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mfma",
    "-mf16c",
    "-mprefer-vector-width=512",
]
ISA_FLAGS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "AVX2": ["-mavx2", "-mfma", "-mf16c"],
        "AVX512": _AVX512,
    },
    "aarch64": {"NEON": []},
}


class BuildError(Exception):
    """The library was not built; the message says why."""


def source_folder() -> Path:
    """custom_kernels/cpu: inside the installed package, else beside it in a checkout."""
    places = [HERE.parent / "custom_kernels" / "cpu", HERE.parent.parent / "custom_kernels" / "cpu"]
    for place in places:
        if (place / "kernels.c").is_file():
            return place
    raise BuildError(f"no C sources in {places[0]} or {places[1]}: the installation is incomplete")


def source_id(folder: Path | None = None) -> str:
    """Digest of the C sources; a library carries the digest of those it was built from."""
    folder = folder or source_folder()
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The C compiler as a command: `CC`, else the first of cc, gcc and clang."""
    if os.environ.get("CC"):
        command = shlex.split(os.environ["CC"])
        if shutil.which(command[0]):
            return command
        raise BuildError(f"CC is {os.environ['CC']!r}, which is not an executable on the PATH")
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C compiler found (cc, gcc or clang)")


def units_for(machine: str) -> list[tuple[str, list[str]]]:
    """What is compiled for an architecture ("x86_64", "aarch64"): file names without `.c`, each with its flags."""
    units: list[tuple[str, list[str]]] = [(name, []) for name in PLAIN_UNITS]
    units.append(("kernels", PORTABLE_FLAGS))
    for isa, flags in ISA_FLAGS.get(machine, {}).items():
        units.append(("kernels", [f"-DK3_ISA_{isa}", *flags]))
    return units


def build(
    target: Path = LIBRARY, compiler: Sequence[str] | None = None, extra_flags: Sequence[str] = ()
) -> Path:
    """Compile and link the library at `target`, replacing it in one step. Raises BuildError.

    `extra_flags` go to the compiler and the linker, for instance sanitizers.
    """
    if os.name == "nt":
        raise BuildError("the CPU kernels use POSIX threads and are not built on Windows")
    command = list(compiler or find_compiler())
    folder = source_folder()
    machine = _output([*command, "-dumpmachine"]).split("-")[0].replace("arm64", "aarch64")
    common = [
        *FLAGS,
        *extra_flags,
        f"-ffile-prefix-map={folder}=cpu",
        f'-DK3_SOURCE_ID="{source_id(folder)}"',
    ]
    units = units_for(machine)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build_cpu_") as work:
        objects = [f"{work}/{number}_{name}.o" for number, (name, _) in enumerate(units)]
        jobs = [
            subprocess.Popen(
                [*command, *common, *flags, "-c", str(folder / f"{name}.c"), "-o", path],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for path, (name, flags) in zip(objects, units, strict=True)
        ]
        failures = [text for job in jobs for text in [job.communicate()[0]] if job.returncode]
        if failures:
            raise BuildError(f"{shlex.join(command)} failed: {failures[0].strip()[:2000]}")
        linked = f"{work}/{target.name}"
        _output([*command, "-shared", *extra_flags, "-o", linked, *objects, "-lpthread", "-lm"])
        os.replace(linked, target)
    return target


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)[:200]} failed: {done.stderr.strip()[:2000]}")
    return done.stdout.strip()
