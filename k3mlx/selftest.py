"""The self-test: every kernel of this package on this machine against the numpy reference, without a model.

Owns the choice of cases, the run in a process of its own with a deadline for each, and the remembered verdict that
gates the automatic use of a GPU (`gate`). Cases and tolerances are in `k3mlx/kernels/cases.py`. Run as
`python -m k3mlx.selftest DEVICE` it is that process: it prints a line as each case begins, at last one JSON object.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from k3mlx.kernels.cases import (
    Case,
    attn_res_case,
    compare,
    kda_case,
    launch_of,
    relative_error,
    route_case,
    run_plain,
)
from k3mlx.kernels.launch import KERNELS, SIMD_WIDTH, WIDTH_PROBE, Maker, simd_width
from k3mlx.kernels.texts import texts_digest

from .apart import NoAnswerError, last_line
from .errors import ResourceError
from .experts.warm import user_cache

DEADLINE = 60.0  # seconds for one case: the slowest compiles a kernel, which takes a few
THREADS = (1024, 512, 256, 128)
RAISED = "runs"  # the measure of a call that raised
CHUNK_TOLERANCE = 2e-5  # of the chunkwise form in float32, specification §2.4


Begin = Callable[[str], None]


def _silent(what: str) -> None:
    """A `Begin` that tells nobody."""


@dataclass(frozen=True)
class Row:
    """One line of the table. path: where it ran (metal, cuda, mlx-cpu, numpy, cpu); seconds: of one call."""

    kernel: str
    case: str
    dtype: str
    path: str
    measure: str
    error: float
    tolerance: float
    seconds: float
    passed: bool
    note: str = ""


@dataclass
class Report:
    """Everything a self-test found. `threads` are the threadgroup sizes that this device accepted, by kernel."""

    device: str
    rows: list[Row] = field(default_factory=list)
    threads: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    def failed_kernels(self) -> dict[str, str]:
        """Why each kernel that failed on the GPU may not be used there, by stem."""
        reasons: dict[str, str] = {}
        for row in self.rows:
            if not row.passed and row.path == self.device and row.kernel in KERNELS:
                what = row.note or f"{row.measure} {row.error:.3g}, at most {row.tolerance:.3g}"
                reasons.setdefault(row.kernel, f"failed its self-test ({row.case} {row.dtype}: {what})")
            if not row.passed and row.path == self.device and row.kernel == WIDTH_PROBE.stem:
                reasons = dict.fromkeys(KERNELS, f"is written for SIMD groups of {SIMD_WIDTH} ({row.note})")
        return reasons


def cases() -> Iterator[Case]:
    """A subset of the proof's cases that a GPU finishes in seconds."""
    for dtype in ("float32", "bfloat16", "float16"):
        yield kda_case("kda_step", heads=4, dtype=dtype)
        yield kda_case("kda_step", "partial", batch=2, tokens=5, heads=3, dtype=dtype)
        yield kda_case("kda_prefill", batch=2, tokens=65, heads=2, dtype=dtype)
        yield attn_res_case(frozen=8, tokens=3, dtype=dtype)
    for kind in ("read_out", "saturated", "parallel", "zero_k"):
        yield kda_case("kda_step", kind, tokens=1 if kind == "read_out" else 31, heads=4)
    yield kda_case("kda_step", tokens=2, heads=1, width=32)
    yield kda_case("kda_prefill", "slow", tokens=63, heads=1, width=64)
    yield attn_res_case(frozen=0, tokens=2, width=96)
    for kind in ("plain", "ties", "nan"):
        yield route_case(tokens=3, kind=kind)
    yield route_case(experts=20, k=4)


def run_here(device: str, begin: Begin = _silent) -> Report:
    """The self-test in this process. device: metal, cuda, mlx-cpu or numpy. `begin` is told each case at its start."""
    report = Report(device)
    report.rows += _numpy_rows()
    report.rows += _cpu_rows(report.notes)
    if device == "numpy":
        report.notes.append("mlx is not installed here: its paths were not tested")
        return report
    import mlx.core as mx

    from k3mlx.model.probe import surprises

    found = surprises()
    report.rows.append(_verdict_row("mlx_probe", "what MLX does not promise", "mlx", found))
    report.rows.append(_verdict_row("mlx_failure", "failures raise", "mlx", _failure_raises()))
    if device == "mlx-cpu":
        report.notes.append(
            "no Metal or CUDA device: the kernels themselves were not run, their MLX paths were"
        )
    else:
        from k3mlx.kernels.mlx_maker import MlxMaker

        report.rows += kernel_rows(report, MlxMaker(device), cases(), _make, _numbers, begin)
    with mx.stream(mx.cpu):
        for case in cases():
            report.rows += _rows(case, "mlx-cpu", partial(_plain, case), begin)
    return report


def _make(x: Any, dtype: str) -> Any:
    import mlx.core as mx

    return mx.array(x).astype(getattr(mx, dtype))


def _numbers(outputs: Sequence[Any]) -> list[np.ndarray]:
    """Evaluated numpy copies, 16-bit floats widened."""
    import mlx.core as mx

    mx.eval(*outputs)
    wide = [o.astype(mx.float32) if o.dtype in (mx.bfloat16, mx.float16) else o for o in outputs]
    return [np.array(o) for o in wide]


def _plain(case: Case) -> list[np.ndarray]:
    return _numbers(run_plain(case, _make))


def kernel_rows(
    report: Report,
    maker: Maker,
    chosen: Iterable[Case],
    make: Callable[[Any, str], Any],
    numbers: Callable[[Sequence[Any]], list[np.ndarray]],
    begin: Begin = _silent,
) -> list[Row]:
    """Every case through its kernel; make(values, dtype) makes arrays, numbers(outputs) evaluates and reads them.

    A threadgroup size that the device refuses is halved, and `report.threads` remembers it.
    """
    built = {stem: maker.build(spec) for stem, spec in KERNELS.items()}

    def launch(case: Case) -> list[np.ndarray]:
        return numbers(built[case.stem](**vars(launch_of(case, maker, make))))

    report.threads = {stem: spec.threads for stem, spec in KERNELS.items()}
    found = [_width_row(report.device, maker, numbers)]
    for case in chosen:
        while True:
            sized = replace(case, threads=report.threads[case.stem])
            rows = _rows(sized, report.device, partial(launch, sized), begin)
            smaller = [n for n in THREADS if n < sized.threads]
            if rows[0].measure != RAISED or not smaller:
                break
            report.threads[case.stem] = smaller[0]
        found += rows
    return found


def _width_row(device: str, maker: Maker, numbers: Callable[[Sequence[Any]], list[np.ndarray]]) -> Row:
    try:
        (width,) = numbers(maker.build(WIDTH_PROBE)(**vars(simd_width(maker))))
        wrong = sorted({int(n) for n in width} - {SIMD_WIDTH})
        found = [f"the device's are of {', '.join(map(str, wrong))}"] if wrong else []
    except Exception as error:
        found = [f"{type(error).__name__}: {error}".splitlines()[0]]
    return _verdict_row(WIDTH_PROBE.stem, f"SIMD groups of {SIMD_WIDTH}", device, found)


def _rows(case: Case, path: str, call: Callable[[], list[np.ndarray]], begin: Begin) -> list[Row]:
    """One row an output; a call that raises is one failed row with the reason. The second call is timed."""
    label = f"{case.label} {case.threads} threads" if path not in ("mlx-cpu", "numpy") else case.label
    begin(f"{case.stem} {label} {case.dtype} on {path}")
    try:
        call()
        start = time.perf_counter()
        outputs = call()
        seconds = time.perf_counter() - start
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        return [Row(case.stem, label, case.dtype, path, RAISED, float("nan"), 0.0, 0.0, False, why)]
    return [
        Row(
            case.stem, f"{label} {c.output}", case.dtype, path, c.measure, c.error, c.tolerance, seconds, c.passed,
            "" if c.passed else c.where,
        )
        for c in case.judge(outputs)
    ]  # fmt: skip


def _numpy_rows() -> list[Row]:
    """The reference against itself: chunkwise in float32 against token by token in float64, and the worked router."""
    from k3mlx.reference import kda, moe

    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((100, 2, 32)) for _ in range(3))  # [T, H, D]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -5 / (1 + np.exp(-2 * rng.standard_normal((100, 2, 32)) + 2))
    beta, state = rng.uniform(0.1, 0.99, (100, 2)), rng.standard_normal((2, 32, 32))
    expected, after = kda.kda_recurrent(q, k, v, g, beta, state)
    start = time.perf_counter()
    narrow = [a.astype(np.float32) for a in (q, k, v, g, beta, state)]
    out, got = kda.kda_chunk(narrow[0], narrow[1], narrow[2], narrow[3], narrow[4], narrow[5])
    seconds = time.perf_counter() - start
    errors = (relative_error(out, expected), relative_error(got, after))
    rows = [
        Row("kda_chunk", f"T100 H2 D32 {name}", "float32", "numpy", "relative L2", error, CHUNK_TOLERANCE, seconds,
            error <= CHUNK_TOLERANCE)
        for name, error in zip(("out", "state"), errors, strict=True)
    ]  # fmt: skip
    logits = np.array([[0.2, -1, 1.5, 0.9, -0.3, 1.4]])
    bias = np.array([0, 0.5, -0.3, 0.05, 0.4, -0.05])
    ids, weights = moe.route_topk(logits, np.eye(6), bias, 2, 1.0)
    check = compare("weights", weights, np.array([[0.6127547, 0.3872453]]), weights, "float32")
    passed = ids.tolist() == [[4, 1]] and check.passed
    return [
        *rows,
        Row(
            "route_topk",
            "worked example",
            "float64",
            "numpy",
            check.measure,
            check.error,
            check.tolerance,
            0.0,
            passed,
        ),
    ]


def _cpu_rows(notes: list[str]) -> list[Row]:
    """The CPU kernels in C, where they are built."""
    from k3mlx.kernels.cpu import load_cpu_kernels
    from k3mlx.kernels.cpu_verify import verify

    try:
        kernels = load_cpu_kernels()
    except Exception as error:
        notes.append(f"the CPU kernels were not tested: {str(error).splitlines()[0]}")
        return []
    start = time.perf_counter()
    checks = verify(kernels)
    seconds = (time.perf_counter() - start) / max(len(checks), 1)
    return [
        Row(
            "cpu_kernels",
            check.name,
            "float32",
            "cpu",
            "relative",
            check.worst,
            check.tolerance,
            seconds,
            check.ok,
        )
        for check in checks
    ]


def _failure_raises() -> list[str]:
    """MLX must say when an evaluation fails: the engine's fallback depends on it."""
    import mlx.core as mx

    try:
        with mx.stream(mx.cpu):
            mx.eval(mx.linalg.inv(mx.zeros((2, 2))))
            mx.synchronize(mx.cpu)
    except Exception:
        return []
    return ["the inverse of a zero matrix was evaluated without an error"]


def _verdict_row(kernel: str, case: str, path: str, wrong: list[str]) -> Row:
    return Row(kernel, case, "", path, "findings", float(len(wrong)), 0.0, 0.0, not wrong, "; ".join(wrong))


def find_device(wanted: str = "auto") -> str:
    """metal, cuda, mlx-cpu or numpy for `--device` auto, gpu or cpu; ResourceError for a GPU that is not there."""
    from .devices import gpu_kind, import_mlx

    try:
        mx = import_mlx()
    except ResourceError as error:
        if wanted == "gpu":
            raise ResourceError(f"--device gpu: {error}") from None
        return "numpy"
    kind = gpu_kind(mx)
    if wanted == "gpu" and kind is None:
        raise ResourceError(
            f"--device gpu, but mlx {mx.__version__} has neither a Metal nor a CUDA device here"
        )
    return "mlx-cpu" if wanted == "cpu" or kind is None else kind


def selftest(device: str, deadline: float = DEADLINE) -> Report:
    """The self-test in a process of its own; a hang or a crash is a failed row, not the end of the caller.

    deadline: seconds that one case may take.
    """
    try:
        return _parsed(json.loads(last_line([sys.executable, "-m", "k3mlx.selftest", device], deadline)))
    except NoAnswerError as error:
        return _lost(device, str(error))


def _lost(device: str, why: str) -> Report:
    rows = [Row(stem, "all", "", device, RAISED, float("nan"), 0.0, 0.0, False, why) for stem in KERNELS]
    return Report(device, rows)


def _parsed(found: dict[str, Any]) -> Report:
    fields: list[dict[str, Any]] = [
        {k: float("nan") if v is None else v for k, v in row.items()} for row in found["rows"]
    ]
    rows = [Row(**row) for row in fields]
    return Report(found["device"], rows, found["threads"], found["notes"])


@dataclass(frozen=True)
class Gate:
    """Which kernels may be used on a device without being asked for. `disabled`: reasons by kernel."""

    disabled: dict[str, str]
    threads: dict[str, int]
    remembered: bool


def gate(device: str, deadline: float = DEADLINE) -> Gate:
    """The verdict of the self-test on `metal` or `cuda`, run once and then remembered.

    Remembered by kernel texts, versions of mlx and of the system, and the device; a failure to run is not
    remembered. The program's folder in the user's cache holds it; where that cannot be written the test runs again.
    """
    known = remembered(device)
    report = known or selftest_and_remember(device, deadline)
    return Gate(report.failed_kernels(), report.threads, known is not None)


def remembered(device: str) -> Report | None:
    """The self-test that `gate` goes by, if it has run with these kernels, this mlx, system and device."""
    try:
        return _parsed(json.loads(_memory(device).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def selftest_and_remember(device: str, deadline: float = DEADLINE) -> Report:
    """The self-test now, in place of what was remembered."""
    report = selftest(device, deadline)
    if report.threads:
        _remember(_memory(device), report)
    return report


def _remember(path: Path, report: Report) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(to_json(report), encoding="utf-8")
        part.replace(path)
    except OSError:
        return  # the test runs again next time


def _memory(device: str) -> Path:
    """The file of the remembered verdict; its name says what it depends on."""
    from importlib.metadata import PackageNotFoundError, version

    from . import __version__

    try:
        mlx = version("mlx")
    except PackageNotFoundError:
        mlx = "none"
    system = (platform.platform(), platform.mac_ver()[0], _device_name(device))
    key = "\0".join([texts_digest(tuple(KERNELS)), __version__, mlx, device, *system])
    return user_cache() / f"selftest-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _device_name(device: str) -> str:
    from .devices import import_mlx

    try:
        info = import_mlx().device_info()
    except (ResourceError, RuntimeError, AttributeError):
        return device
    return str(info.get("device_name", device)) if isinstance(info, dict) else device


def to_json(report: Report) -> str:
    """One object: device, passed, rows, threads, notes. A number that is not one is null."""
    rows = [
        {key: None if value != value else value for key, value in asdict(row).items()} for row in report.rows
    ]
    return json.dumps(
        {
            "device": report.device,
            "passed": report.passed,
            "rows": rows,
            "threads": report.threads,
            "notes": report.notes,
        }
    )


def main() -> int:
    print(to_json(run_here(sys.argv[1], partial(print, flush=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
