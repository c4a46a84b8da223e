"""The kernels under sanitizers, valgrind and an Arm emulator: cases go through a C program of their own.

A CASES file: number of cases; for each: threads, offset, experts, tokens; matrices (format, group, scale type, rows,
cols, row bytes, scale bytes as int64, then weights, scales, biases); x; with experts also start, token, weight. With
experts -1 and -2 follow the sizes and arrays of a KDA step, or of products head by head, in place of matrices.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from k3mlx.kernels import cpu_build
from k3mlx.kernels.cpu_matrix import Matrix
from k3mlx.kernels.cpu_verify import relative_error
from k3mlx.reference import kda, mla

from .test_cpu_experts import Case
from .test_cpu_matmul import FORMATS, make
from .test_cpu_parts import in_float64, kda_case

pytestmark = pytest.mark.slow

HARNESS = Path(__file__).with_name("harness.c")
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZE_THREADS = ["-O1", "-g", "-fsanitize=thread"]


def build_harness(folder: Path, compiler: str, units: list[tuple[str, list[str]]], flags: list[str]) -> Path:
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    source = cpu_build.source_folder()
    objects = []
    for number, (name, isa_flags) in enumerate([*units, ("harness", [])]):
        path = HARNESS if name == "harness" else source / f"{name}.c"
        objects.append(str(folder / f"{number}.o"))
        command = [
            compiler,
            *cpu_build.FLAGS,
            *flags,
            *isa_flags,
            f"-I{source}",
            "-c",
            str(path),
            "-o",
            objects[-1],
        ]
        subprocess.run(command, check=True)
    program = folder / "harness"
    subprocess.run([compiler, *flags, *objects, "-o", str(program), "-lpthread", "-lm"], check=True)
    return program


def pack_matrix(matrix: Matrix) -> bytes:
    record = matrix.record[0]
    fields = ("format", "group", "scale_type", "rows", "cols", "row_bytes", "scale_bytes")
    head = np.array([record[field] for field in fields], np.int64).tobytes()
    return head + b"".join(np.ascontiguousarray(a).tobytes() for a in matrix.arrays)


def products(count: int, largest: int) -> Iterator[tuple[bytes, Matrix, np.ndarray, np.ndarray]]:
    for seed in range(count):
        rng = np.random.default_rng(seed)
        name = FORMATS[seed % len(FORMATS)]
        unit = (
            1
            if name in ("float32", "float16", "bf16")
            else 32
            if name == "mxfp4"
            else int(name.split("-")[1])
        )
        rows, cols = int(rng.integers(1, 75)), unit * int(rng.integers(1, 1 + largest // unit))
        tokens = (1, 2, 3, 4, 7, 16, 17, 53)[seed % 8]
        matrix, weight = make(rng, name, rows, cols)
        x = rng.standard_normal((tokens, cols)).astype(np.float32)
        head = np.array([1 + seed % 3, seed % 4, 0, tokens], np.int64).tobytes()
        yield head + pack_matrix(matrix) + x.tobytes(), matrix, weight, x


def mixture(seed: int) -> tuple[bytes, np.ndarray]:
    case = Case(np.random.default_rng(seed), 96 + 32 * seed, 160, 4, 1 + 25 * seed, 2)
    head = np.array([2, seed, len(case.experts), len(case.x)], np.int64).tobytes()
    matrices = b"".join(pack_matrix(Matrix.mxfp4(*e[i : i + 2])) for e in case.experts for i in (0, 2, 4))
    start = np.cumsum([0, *map(len, case.tokens)], dtype=np.int64)
    token = np.concatenate(case.tokens).astype(np.int64)
    weight = np.concatenate(case.token_weights).astype(np.float32)
    arrays = b"".join(a.tobytes() for a in (case.x, start, token, weight))
    return head + matrices + arrays, case.expected()


def kda_steps(seed: int) -> tuple[bytes, np.ndarray]:
    tokens, heads, width, taps = ((1, 3, 128, 4), (2, 2, 48, 3), (5, 1, 256, 8))[seed]
    case = kda_case(np.random.default_rng(seed), tokens, heads, width, taps)
    head = np.array([1 + seed, 0, -1, tokens, heads, width, taps], np.int64).tobytes()
    arrays = [part for part in case if isinstance(part, np.ndarray)]
    expected = np.concatenate([part.ravel() for part in kda.kda_step(*in_float64(case))])
    return head + b"".join(array.tobytes() for array in arrays), expected


def head_products(seed: int) -> tuple[bytes, np.ndarray]:
    tokens, heads, rows, cols = ((1, 3, 7, 144), (3, 2, 20, 16))[seed // 2]
    rng, transposed = np.random.default_rng(seed), seed % 2
    w = rng.standard_normal((heads, rows, cols)).astype(np.float32)
    x = rng.standard_normal((tokens, heads, cols if transposed else rows)).astype(np.float32)
    maps = w.transpose(0, 2, 1) if transposed else w
    head = np.array([2, 0, -2, tokens, heads, rows, cols, transposed], np.int64).tobytes()
    return head + w.tobytes() + x.tobytes(), mla.per_head(
        x.astype(np.float64), maps.astype(np.float64)
    ).ravel()


def run_and_check(command: list[str], isa: str, folder: Path, count: int = 84, largest: int = 1500) -> None:
    matmuls, mixtures = list(products(count, largest)), [mixture(seed) for seed in range(3)]
    attention = [kda_steps(seed) for seed in range(3)] + [head_products(seed) for seed in range(4)]
    cases = [m[0] for m in (*matmuls, *mixtures, *attention)]
    (folder / "cases").write_bytes(np.int64(len(cases)).tobytes() + b"".join(cases))
    done = subprocess.run(
        [*command, isa, str(folder / "cases"), str(folder / "results")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},  # the harness keeps its arrays to the end
    )
    if done.returncode == 4:
        pytest.skip(f"{isa} does not run here")
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-3000:]}"
    results, at = np.fromfile(folder / "results", np.float32), 0
    for number, (_, _, weight, x) in enumerate(matmuls):
        size = len(x) * len(weight)
        error = relative_error(results[at : at + size].reshape(len(x), -1), x, weight)
        assert error <= 1e-6, f"product {number} {weight.shape} x {len(x)}: relative error {error:.3g}"
        at += size
    for number, (_, expected) in enumerate(mixtures):
        got = results[at : at + expected.size].reshape(expected.shape)
        assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max(), f"mixture {number}"
        at += expected.size
    for number, (_, expected) in enumerate(attention):
        got = results[at : at + expected.size]
        assert np.abs(got - expected).max() <= 3e-6 * np.abs(expected).max(), f"part of attention {number}"
        at += expected.size
    assert at == len(results)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    machine = platform.machine().replace("arm64", "aarch64")
    return build_harness(tmp_path_factory.mktemp("sanitized"), "cc", cpu_build.units_for(machine), SANITIZE)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512vnni", "neon"])
def test_address_and_undefined_behaviour_sanitizers(sanitized, tmp_path, isa):
    run_and_check([str(sanitized)], isa, tmp_path)


def test_thread_sanitizer(tmp_path):
    """The pool changes its size from case to case."""
    machine = platform.machine().replace("arm64", "aarch64")
    program = build_harness(tmp_path, "cc", cpu_build.units_for(machine), SANITIZE_THREADS)
    run_and_check([str(program)], "portable", tmp_path)


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_valgrind(tmp_path, isa):
    """Uninitialised values and stray accesses; valgrind does not know AVX-512."""
    if not shutil.which("valgrind"):
        pytest.skip("valgrind is not installed")
    if platform.machine() != "x86_64":
        pytest.skip("the AVX2 form needs x86-64")
    program = build_harness(tmp_path, "cc", cpu_build.units_for("x86_64"), ["-g"])
    command = ["valgrind", "--error-exitcode=9", "--leak-check=no", "-q", str(program)]
    run_and_check(command, isa, tmp_path, count=42, largest=700)


@pytest.mark.parametrize("isa", ["neon", "portable"])
def test_arm_under_an_emulator(tmp_path, isa):
    """Cross-compiled for AArch64, run by qemu-user: arithmetic is checked, speed is not."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not emulator:
        pytest.skip("qemu-user is not installed")
    program = build_harness(tmp_path, "aarch64-linux-gnu-gcc", cpu_build.units_for("aarch64"), ["-static"])
    run_and_check([emulator, str(program)], isa, tmp_path)
