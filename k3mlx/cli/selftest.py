"""`k3mlx selftest`: a table of every kernel against the numpy reference on this machine, no model needed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from .options import check_target, write_text

if TYPE_CHECKING:
    from k3mlx.selftest import Report

HELP = "test every kernel on this machine against the numpy reference; no model needed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "gpu", "cpu"), default="auto", help="gpu: Metal or CUDA, or exit 4"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results as one object; - is stdout")
    parser.add_argument(
        "--deadline", type=float, default=60.0, metavar="SECONDS", help="for one case (default 60)"
    )


def run(args: argparse.Namespace) -> int:
    from k3mlx.errors import UsageError
    from k3mlx.selftest import find_device, selftest, to_json

    if args.deadline <= 0:
        raise UsageError(f"--deadline is {args.deadline}, expected more than 0")
    check_target(args.json, "--json")
    report = selftest(find_device(args.device), args.deadline)
    table = sys.stderr if args.json == "-" else sys.stdout
    print(format_table(report), file=table)
    if args.json:
        write_text(args.json, json.dumps(json.loads(to_json(report)), indent=1) + "\n", "--json")
    return 0 if report.passed else 1


def format_table(report: Report) -> str:
    """The rows in columns, the notes, and a last line with the verdict."""
    header = ("kernel", "path", "case", "dtype", "worst error", "tolerance", "ms", "verdict")
    cells = [
        (
            row.kernel, row.path, row.case, row.dtype, f"{row.error:.2e} {row.measure}", f"{row.tolerance:.2e}",
            f"{row.seconds * 1e3:.2f}", "ok" if row.passed else f"FAILED {row.note}".rstrip(),
        )
        for row in report.rows
    ]  # fmt: skip
    widths = [max(len(line[n]) for line in (header, *cells)) for n in range(len(header) - 1)]
    lines = [
        "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[-1]])
        for line in (header, *cells)
    ]
    lines += report.notes
    if report.threads:
        lines.append("threads of a threadgroup: " + ", ".join(f"{k} {n}" for k, n in report.threads.items()))
    failed = sum(not row.passed for row in report.rows)
    lines.append(f"{report.device}: {len(report.rows)} checks, {failed} failed")
    return "\n".join(lines)
