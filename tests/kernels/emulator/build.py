"""Compiles a generated kernel with g++ and runs it as a process of its own with a deadline.

Owns the compiler's command lines, the cache of executables, the job file of runtime.cpp, and the
translation of a finding back to a buffer, an index and a line of the kernel text.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
COMPILER = (
    "g++"
    if shutil.which("g++") and shutil.which("nm") and platform.machine() == "x86_64" and os.name == "posix"
    else ""
)  # empty where the emulator cannot run
CACHE = Path(tempfile.gettempdir()) / f"k3mlx-emulator-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
THREADGROUP_BYTES = 32768
DEADLINE = 60.0  # seconds a launch may take
_COMMON = ["-std=c++17", "-O0", "-g1", "-w", "-fno-exceptions", "-ffp-contract=off", "-fno-pie"]
_CHECKS = [
    "-fsanitize=thread",
    "-fsanitize=bounds,alignment,signed-integer-overflow,integer-divide-by-zero,shift,float-cast-overflow",
    "--param=tsan-instrument-func-entry-exit=0",
    "-ftrivial-auto-var-init=pattern",
]
_PLAIN = ["-ftrivial-auto-var-init=zero"]
_SIZES = {
    "float": 4,
    "uint": 4,
    "int": 4,
    "half": 2,
    "ushort": 2,
    "short": 2,
    "bfloat16_t": 2,
    "float16_t": 2,
}


class CompileError(Exception):
    """g++ refused the text."""


class Finding(Exception):
    """Something is wrong with a launch. kind: bounds, race, divergence, uninitialised, unwritten, overflow,
    alignment, input, lane, threadgroup, private, crash, deadline."""

    def __init__(self, kind: str, details: str, **words: str | int) -> None:
        super().__init__(f"{kind}: {details}")
        self.kind = kind
        self.words = words


@dataclass(frozen=True)
class Executable:
    """A compiled kernel: its file and its threadgroup arrays (name, address, bytes)."""

    path: Path
    arrays: tuple[tuple[str, int, int, int], ...]  # name, address, bytes, bytes of an element


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CompileError(result.stderr[:4000])
    return result.stdout


def _cached(key: str, suffix: str) -> Path:
    CACHE.mkdir(mode=0o700, exist_ok=True)
    return CACHE / (hashlib.sha256(key.encode()).hexdigest()[:32] + suffix)


def runtime() -> Path:
    """The object file of runtime.cpp, compiled once."""
    source = HERE / "runtime.cpp"
    path = _cached(source.read_text(), ".o")
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        _run([COMPILER, "-std=c++17", "-O2", "-w", "-fno-pie", "-c", str(source), "-o", str(part)])
        part.rename(path)
    return path


def compile_kernel(text: str, checked: bool) -> Executable:
    """Compile a translation unit: with every check, or plain with private variables preset to zero."""
    scheduler = runtime()
    flags = [*_COMMON, *(_CHECKS if checked else _PLAIN)]
    path = _cached("\0".join([text, (HERE / "metal.h").read_text(), str(scheduler), *flags]), ".exe")
    if not path.exists():
        stem = path.with_suffix(f".{os.getpid()}")
        source, obj, exe = (stem.with_name(stem.name + s) for s in (".cpp", ".o", ".part"))
        source.write_text(text)
        try:
            _run([COMPILER, *flags, "-I", str(HERE), "-c", str(source), "-o", str(obj)])
            if "guard variable" in _run(["nm", "-C", str(obj)]):
                raise Finding("threadgroup", "a threadgroup array has an initialiser")
            _run([COMPILER, "-no-pie", str(obj), str(scheduler), "-lm", "-o", str(exe)])
            exe.rename(path)
        finally:
            for file in (source, obj, exe):
                file.unlink(missing_ok=True)
    return Executable(path, _threadgroup_arrays(path, text))


def _threadgroup_arrays(path: Path, text: str) -> tuple[tuple[str, int, int, int], ...]:
    types = {name: kind for kind, name in re.findall(r"\bthreadgroup\s+(\w+)\s+(\w+)", text)}
    arrays = []
    for line in _run(["nm", "-S", "-C", str(path)]).splitlines():
        match = re.match(r"([0-9a-f]+) ([0-9a-f]+) [bBdDuVv] .*custom_kernel_.*::(\w+)$", line)
        if match and match[3] in types:
            arrays.append((match[3], int(match[1], 16), int(match[2], 16), _SIZES.get(types[match[3]], 1)))
    total = sum((size + 15) // 16 * 16 for _, _, size, _ in arrays)
    if total > THREADGROUP_BYTES:
        raise Finding("threadgroup", f"{total} bytes of threadgroup memory, at most {THREADGROUP_BYTES}")
    return tuple(arrays)


def execute(
    exe: Executable,
    buffers: list[tuple[str, int, int, bytes]],
    grid: tuple[int, ...],
    threadgroup: tuple[int, ...],
    checked: bool,
    deadline: float = DEADLINE,
) -> list[bytes]:
    """Run one launch. buffers: (name, kind, bytes of an element, contents), kind 0 input, 1 output, 2 output with
    an initial value. Returns the contents of the outputs, in order."""
    job = struct.pack("<8I", *grid, *threadgroup, len(buffers), len(exe.arrays) if checked else 0)
    for _, kind, cell, contents in buffers:
        job += struct.pack("<QII", len(contents), cell, kind) + contents
    for _, address, size, cell in exe.arrays if checked else ():
        job += struct.pack("<QQI", address, size, cell)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="k3mlx-", dir=folder) as scratch:
        source, target = Path(scratch, "job"), Path(scratch, "result")
        source.write_bytes(job)
        try:
            result = subprocess.run(
                [str(exe.path), str(source), str(target), str(int(checked))],
                capture_output=True, text=True, timeout=deadline, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Finding("deadline", f"still running after {deadline} s") from None
        if result.returncode == 3:
            raise _finding(exe, result.stdout, [name for name, *_ in buffers])
        if result.returncode:
            raise Finding("crash", f"the process ended with status {result.returncode}")
        data = target.read_bytes()
    outputs, offset = [], 0
    for _, kind, _, contents in buffers:
        if kind:
            outputs.append(data[offset : offset + len(contents)])
            offset += len(contents)
    return outputs


def _finding(exe: Executable, line: str, names: list[str]) -> Finding:
    words: dict[str, str | int] = dict(re.findall(r"(\w+)=(\S+)", line))
    names = names + [name for name, *_ in exe.arrays]
    if "region" in words:
        words["buffer"] = names[int(words.pop("region"))]
    pc = str(words.pop("pc"))
    if "line" not in words and pc != "(nil)":
        # the call returns to the next instruction; the outermost inlined frame is the kernel's own line
        where = _run(["addr2line", "-i", "-e", str(exe.path), hex(int(pc, 16) - 1)]).splitlines()
        frames = [frame for frame in where if "metal.h" not in frame] or where
        words["file"], _, words["line"] = frames[0].split(" ")[0].rpartition(":")
    words["file"] = Path(str(words.get("file", ""))).name
    kind = str(words.pop("kind"))
    details = ", ".join(f"{name} {value}" for name, value in words.items())
    return Finding(kind, details, **words)
