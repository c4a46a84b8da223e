"""`k3mlx doctor`: what stands in the way of a run on this machine, a line each, and what to do about it."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from .options import check_target, parts_table, write_text

if TYPE_CHECKING:
    from k3mlx.doctor.findings import Finding

HELP = "look for what stands in the way of a run: machine, packages, kernels, files, memory, disk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="folder or repo id in the local cache (default: the small K3 in the package)"
    )
    parser.add_argument("--model-dirs", nargs="+", default=(), metavar="DIR", help="as k3mlx generate has it")
    parser.add_argument("--backend", choices=("auto", "mlx", "numpy"), default="auto")
    parser.add_argument(
        "--device", choices=("auto", "gpu", "cpu"), default="auto", help="gpu: Metal or CUDA, or exit 4"
    )
    parser.add_argument(
        "--memory", default="auto", metavar="SIZE", help="that a run may use (default: what there is)"
    )
    parser.add_argument("--selftest", action="store_true", help="run the self-test of the kernels now")
    parser.add_argument("--json", metavar="FILE", help="write the findings as one object; - is stdout")


def run(args: argparse.Namespace) -> int:
    from k3mlx.doctor.diagnosis import Options, diagnose
    from k3mlx.doctor.findings import exit_code
    from k3mlx.errors import UsageError
    from k3mlx.memory import parse_size

    check_target(args.json, "--json")
    for folder in args.model_dirs:
        if not Path(folder).is_dir():
            raise UsageError(f"--model-dirs: {folder} is not a folder")
    options = Options(
        args.model, args.backend, args.device,
        None if args.memory == "auto" else parse_size(args.memory, "--memory"),
        tuple(map(Path, args.model_dirs)), args.selftest,
    )  # fmt: skip
    out = sys.stderr if args.json == "-" else sys.stdout
    findings = list(_shown(diagnose(options), out, args.verbose))
    code = exit_code(findings)
    counts = [sum(finding.level == level for finding in findings) for level in ("fatal", "warning")]
    print(f"{counts[0]} fatal, {counts[1]} warnings", file=out)
    if args.json:
        object = {"exit_code": code, "model": args.model, "findings": [asdict(f) for f in findings]}
        write_text(args.json, json.dumps(object, ensure_ascii=False, indent=1) + "\n", "--json")
    return code


def _shown(findings: Iterable[Finding], out: TextIO, verbose: bool) -> Iterable[Finding]:
    """Print each finding when it comes. A remedy that several in a row have is printed after the last of them."""
    remedy = ""
    for finding in findings:
        if remedy and finding.remedy != remedy:
            _print_remedy(remedy, out)
        print(f"{finding.level:7}  {finding.code:12}  {finding.text}", file=out, flush=True)
        remedy = finding.remedy
        lines = list(finding.details) if verbose else []
        if "parts" in finding.data:
            lines += parts_table(finding.data["parts"]).splitlines()
        print(textwrap.indent("\n".join(lines), " " * 11), end="\n" * bool(lines), file=out)
        yield finding
    if remedy:
        _print_remedy(remedy, out)


def _print_remedy(remedy: str, out: TextIO) -> None:
    print(f"{'':9}-> {remedy}", file=out, flush=True)
