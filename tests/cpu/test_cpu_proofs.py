"""The kernels under sanitizers, valgrind and an Arm emulator: cases go through a C program of their own.

A CASES file: number of cases; for each: threads, offset, experts, tokens; matrices (format, group, scale type, rows,
cols, row bytes, scale bytes as int64, then weights, scales, biases); x; with experts also start, token, weight. With
experts -1 a job of a sequence follows: its kind, the number of its fields, and for each two numbers and its bytes.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from k3mlx.kernels import cpu_build
from k3mlx.kernels.cpu_matrix import Matrix
from k3mlx.kernels.cpu_queue import Kind, bits
from k3mlx.kernels.cpu_verify import relative_error
from k3mlx.reference import kda
from k3mlx.reference.attn_res import attn_res_mix
from k3mlx.reference.model import Parts
from k3mlx.reference.moe import select_topk

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


def job(threads: int, kind: Kind, fields: Sequence[int | np.ndarray | np.dtype | tuple]) -> bytes:
    """A job: numbers, arrays that it is given, and (count, dtype) of what it makes."""
    parts = [np.array([threads, 0, -1, 0, kind, len(fields)], np.int64).tobytes()]
    for field in fields:
        if isinstance(field, np.ndarray):
            parts += [np.array([1, field.nbytes], np.int64).tobytes(), field.tobytes()]
        elif isinstance(field, tuple):
            parts += [np.array([2, field[0] * np.dtype(field[1]).itemsize], np.int64).tobytes()]
        else:
            parts += [np.array([0, field], np.int64).tobytes()]
    return b"".join(parts)


def normal(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def wide(arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


def jobs() -> Iterator[tuple[bytes, list[np.ndarray]]]:
    """Every kind of job that computes between the products, with what it has to give."""
    numpy, rng = Parts(), np.random.default_rng(5)
    for seed, (tokens, heads, width, taps) in enumerate([(1, 3, 128, 4), (2, 2, 48, 3), (5, 1, 256, 8)]):
        case = kda_case(rng, tokens, heads, width, taps)
        arrays, limits = case[:12], case[12:]
        made = [(size, np.float32) for size in (case[0].size, case[6].size, case[7].size)]
        given = *arrays[:4], arrays[5], arrays[4], *arrays[6:]  # the gate before b
        fields = tokens, heads, width, taps, *given, *made, *map(bits, limits)
        yield job(1 + seed, Kind.KDA, fields), list(kda.kda_step(*in_float64(case)))
    for tokens, heads, nope, ext, rank, value, cached in [(1, 6, 7, 16, 48, 5, 1), (3, 4, 24, 16, 96, 8, 70)]:
        q, rows, maps = normal(
            rng, (tokens, heads, nope + ext), (cached, rank + ext), (heads * (nope + value), rank)
        )
        out, scale = (tokens * heads * value, np.float32), bits(0.05)
        fields = tokens, heads, nope, ext, rank, value, cached, q, rows, maps, out, scale
        yield job(2, Kind.ATTENTION, fields), [numpy.attend(*wide((q, rows, maps)), nope, rank, 0.05)]
    x, y, z, norm, query = normal(rng, *[(3, 80)] * 3, (80,), (80,))
    out = 240, np.float32
    fields = 3, 80, 3, norm, query, out, bits(1e-5), x, y, z
    mixed = attn_res_mix(wide((x, y)), *wide((z, norm, query)), 1e-5)
    yield job(2, Kind.DEPTH_MIX, fields), [mixed]
    for width in (80, 64):  # the whole of a row, and its beginning
        fields = 3, width, 80 - width, x, norm[:width], out, bits(1e-5)
        yield job(1, Kind.NORM, fields), [numpy.latent_rows(*wide((x, norm[:width])), 1e-5)]
    yield job(1, Kind.COPY, (240, x, x, out)), [x]
    yield job(1, Kind.SUM, (240, x, y, out)), [x + y.astype(np.float64)]
    yield job(1, Kind.GATE, (240, x, y, out)), [numpy.gated(*wide((x, y)))]
    logits, bias = normal(rng, (2, 37), (37,))
    ids, weights = select_topk(logits.astype(np.float64), bias, 6, 2.5)
    fields = 2, 37, 6, logits, bias, (12, np.int64), (12, np.float32), bits(2.5)
    yield job(2, Kind.ROUTE, fields), [ids, weights]


def run_and_check(command: list[str], isa: str, folder: Path, count: int = 84, largest: int = 1500) -> None:
    matmuls, mixtures = list(products(count, largest)), [mixture(seed) for seed in range(3)]
    others = list(jobs())
    cases = [m[0] for m in (*matmuls, *mixtures, *others)]
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
    at *= 4  # bytes
    for number, (_, results_of) in enumerate(others):
        for expected in results_of:
            kind = expected.dtype if expected.dtype.kind == "i" else np.dtype(np.float32)
            got = np.frombuffer(results.tobytes(), kind, expected.size, at).reshape(expected.shape)
            assert np.abs(got - expected).max() <= 3e-6 * np.abs(expected).max(), f"job {number}"
            at += got.nbytes
    assert at == results.nbytes


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
