"""Kernels on this machine: the C ones of the CPU and what their lack costs, the verdict on those of the GPU.

Owns these facts and the findings. Switching a kernel off is the engine's business, by the same verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3mlx.devices import Choice
from k3mlx.errors import K3Error
from k3mlx.selftest import Report

from .findings import Finding, fatal, ok, warning


@dataclass(frozen=True)
class CpuKernels:
    """The C kernels as found. description: instruction set and threads. isas: those that run here, best first.
    wrong: checks that failed. missing: why they cannot be used. no_compiler: why there is no C compiler."""

    description: str = ""
    isas: tuple[str, ...] = ()
    checks: int = 0
    wrong: tuple[str, ...] = ()
    missing: str = ""
    no_compiler: str = ""


def look_at_cpu_kernels() -> CpuKernels:
    """Load the C kernels and check them, a fraction of a second."""
    from k3mlx.kernels.cpu import available_isas, load_cpu_kernels
    from k3mlx.kernels.cpu_verify import verify

    try:
        kernels = load_cpu_kernels()
        checks = verify(kernels)
    except K3Error as error:
        return CpuKernels(missing=str(error), no_compiler=_compiler_problem())
    return CpuKernels(
        kernels.describe(),
        tuple(available_isas()),
        len(checks),
        tuple(f"{check.name} by {check.worst:.1e}" for check in checks if not check.ok),
    )


def check_cpu_kernels(found: CpuKernels) -> Finding:
    """The instruction set in use, or what is missing and what it costs."""
    cost = (
        "the numpy backend decodes experts at every use, 30 times slower where we measured (two x86-64 cores),"
        " and keeps the dense weights of a large model in float32, twice their bytes in bf16"
    )
    if found.missing:
        if found.no_compiler:
            remedy = (
                "install a C compiler (apt-get install gcc; xcode-select --install on macOS), then"
                " pip install k3mlx again, or python scripts/build_cpu.py in a checkout"
            )
            return warning("cpu-kernels", f"no C kernels, and {found.no_compiler}: {cost}", remedy)
        what, _, remedy = found.missing.rpartition("; ")
        if not what:
            what, remedy = found.missing, "unset K3_CPU_ISA, or build the kernels again"
        return warning("cpu-kernels", f"{what}: {cost}", remedy)
    if found.wrong:
        text = f"{found.description}: {len(found.wrong)} of {found.checks} checks failed"
        remedy = "report it with the output of k3mlx selftest --json -, or try K3_CPU_ISA=portable"
        return warning("cpu-kernels", f"{text}: {cost}", remedy, found.wrong)
    return ok(
        "cpu-kernels", f"{found.description}: {found.checks} checks passed",
        [f"instruction sets that run here: {', '.join(found.isas)}"], data={"isas": list(found.isas)},
    )  # fmt: skip


def check_gpu_kernels(device: str, report: Report | None) -> Finding:
    """The remembered verdict on the kernels of a device (metal, cuda, or anything without them)."""
    if device not in ("metal", "cuda"):
        return ok("gpu-kernels", "no GPU is used, so none of its kernels")
    if report is None:
        return warning(
            "gpu-kernels", f"the kernels have not been tested on this {device} device, or the result is not kept",
            "k3mlx doctor --selftest",
        )  # fmt: skip
    failed = report.failed_kernels()
    if failed:
        lines = [f"{stem}: {why}" for stem, why in failed.items()]
        return warning(
            "gpu-kernels", f"plain MLX operations instead of {len(failed)} of the kernels ({'; '.join(lines)})",
            "report it with the output of k3mlx selftest --json -", lines,
        )  # fmt: skip
    passed = sum(row.path == device for row in report.rows)
    return ok("gpu-kernels", f"{passed} checks on {device} passed; this verdict is the one the engine uses")


def check_selftest(report: Report) -> Finding:
    """A self-test that has just run. What has no fallback must not fail; kernels that fail are switched off."""
    failed = [f"{row.kernel} {row.path} {row.case}: {row.note}" for row in report.rows if not row.passed]
    if not failed:
        return ok("selftest", f"{len(report.rows)} checks passed ({report.device})", report.notes)
    switched_off = (report.device, "cpu") if report.device in ("metal", "cuda") else ("cpu",)
    text = f"{len(failed)} of {len(report.rows)} checks failed ({report.device}): {failed[0]}"
    remedy = "report it with the output of k3mlx selftest --json -"
    if all(row.passed or row.path in switched_off for row in report.rows):
        return warning("selftest", f"{text}; that kernel is not used", remedy, failed)
    return fatal("selftest", text, remedy, failed)


def run_selftest(choice: Choice) -> Report:
    """The self-test of a run's device, in a process of its own; the engine goes by its verdict from now on."""
    from k3mlx.selftest import selftest_and_remember

    on_cpu = "numpy" if choice.backend == "numpy" else "mlx-cpu"
    return selftest_and_remember(on_cpu if choice.device == "cpu" else choice.device)


def _compiler_problem() -> str:
    from k3mlx.kernels.cpu_build import BuildError, find_compiler

    try:
        find_compiler()
    except BuildError as error:
        return str(error)
    return ""
