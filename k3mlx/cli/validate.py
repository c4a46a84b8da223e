"""`k3mlx validate`: a prompt through two paths, which stage differs first, and what it comes to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import add_run_options, check_target, note, write_text
from .progress import PromptProgress

if TYPE_CHECKING:
    from k3mlx.validate import Report
    from k3mlx.validate.agreement import Agreement

HELP = "compare two ways of computing the model, layer by layer and stage by stage"
PROMPT = (
    "The sea was calm that morning, and the captain, who had seen many such mornings, did not trust it. He counted"
    " the barrels: 7, 12 and 31 of them. 'Copy this,' he said, 'x = (3.5 * y) + 1', and went below without a word."
)
RANDOM_IDS = 64  # tokens for a model without a vocabulary
SHOWN = 10  # stages out of tolerance, or divergences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", "-p", metavar="TEXT", help="plain text; - is stdin (default: two sentences)"
    )
    parser.add_argument("--ids", metavar="N,N,...", help="token ids in place of a prompt")
    parser.add_argument("--layer", default="all", metavar="N|all", help="compare one layer; then no logits")
    parser.add_argument("--token", type=int, metavar="N", help="compare one position of the prompt")
    parser.add_argument("--stages", metavar="NAMES", help="compare some stages: kda.*,moe.weights,...")
    parser.add_argument(
        "--decode", type=int, default=2, metavar="N", help="tokens at the end that are fed one at a time (2)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="of a stage (default: by dtype, float32 5e-5, bfloat16 4e-2)",
    )
    parser.add_argument(
        "--against",
        default="numpy,dtype=float64",
        metavar="PATH",
        help="what is taken for right: BACKEND[,dtype=..][,device=..][,kernels=on|off][,experts-kernel=..]"
        "[,dense-kernel=..][,experts-device=..][,model=FOLDER] (default: numpy,dtype=float64)",
    )
    parser.add_argument("--kernels", choices=("on", "off"), default="on", help="GPU kernels of this package")
    parser.add_argument("--io-threads", type=int, metavar="N", help="reads at once (default: 4)")
    parser.add_argument("--json", metavar="FILE", help="write every figure as one object; - is stdout")
    parser.add_argument(
        "--report", metavar="FILE.png", help="a picture of the error by depth (extra: report)"
    )
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    from k3mlx.validate import Options, PathSpec, parse_spec, validate
    from k3mlx.validate.path import open_path

    layer = _layer(args.layer)
    check_target(args.json, "--json")
    _check_report(args.report)
    names = (
        "backend",
        "device",
        "dtype",
        "kernels",
        "experts_device",
        "experts_kernel",
        "dense_kernel",
        "cpu_threads",
    )
    tried = PathSpec(**{name: getattr(args, name) for name in names})
    right, lines = open_path(parse_spec(args.against), args.model, args.io_threads)
    try:
        path, more = open_path(tried, args.model, args.io_threads)
        try:
            for line in (*lines, *more):
                note(f"k3mlx: {line}")
            ids = _ids(args, right.config.vocab_size)
            note(f"{path.name} against {right.name}, {len(ids)} tokens")
            for line in _what_runs(path.parts()):
                note(line)
            options = Options(layer, args.token, args.stages, args.decode, args.tolerance)
            report = validate(right, path, ids, options, PromptProgress())
        finally:
            path.close()
    finally:
        right.close()
    _write(args, report)
    return 0 if report.passed else 1


def _write(args: argparse.Namespace, report: Report) -> None:
    from k3mlx.memory import format_size, peak_memory_bytes

    print(format_report(report), file=sys.stderr if args.json == "-" else sys.stdout)
    peak = peak_memory_bytes()
    note(f"peak memory {format_size(peak)}")
    if args.report:
        from k3mlx.validate.picture import picture

        Path(args.report).write_bytes(picture(report))
    if args.json:
        write_text(
            args.json, json.dumps(report.to_dict() | {"peak_memory_bytes": peak}, indent=1) + "\n", "--json"
        )


def _what_runs(parts: list[dict[str, Any]]) -> list[str]:
    """A line for each kernel and weight format: the parts that have it."""
    found: dict[str, list[str]] = {}
    for part in parts:
        found.setdefault(f"{part['kernel']} on {part['device']}, weights {part['format']}", []).append(
            part["part"]
        )
    return [f"  {', '.join(names)}: {how}" for how, names in found.items()]


def format_report(report: Report) -> str:
    """The layers, the stages of one layer if there is but one, what is wrong, and how the logits compare."""
    single = [layer for layer in report.layers if layer.layer is not None]
    lines = _stage_lines(report) if len(single) == 1 and report.agreement is None else _layer_lines(report)
    if report.unseen:
        lines.append(f"not shown by {report.got}, as they are inside a kernel: {', '.join(report.unseen)}")
    wrong = [stage for stage in report.stages if not stage.ok]
    lines += [
        ("first out of tolerance: " if n == 0 else "  also ") + s.sentence()
        for n, s in enumerate(wrong[:SHOWN])
    ]
    if len(wrong) > SHOWN:
        lines.append(f"  and {len(wrong) - SHOWN} more")
    if report.agreement is not None:
        lines += _agreement_lines(report.agreement)
    lines.append(
        f"{len(report.stages)} stages, {len(wrong)} out of tolerance: {'ok' if report.passed else 'FAILED'}"
    )
    return "\n".join(lines)


def _layer_lines(report: Report) -> list[str]:
    rows = [("layer", "kind", "worst stage", "error", "tolerance", "drift", "rerouted", "")]
    for layer in report.layers:
        worst = layer.worst
        if worst is None:
            continue
        rows.append(
            (
                "" if layer.layer is None else str(layer.layer), layer.kind, worst.stage, f"{worst.error:.1e}",
                f"{worst.tolerance:.0e}", "" if layer.drift is None else f"{layer.drift:.1e}",
                "" if layer.rerouted is None else str(layer.rerouted), "" if worst.ok else "FAILED",
            )
        )  # fmt: skip
    return _columns(rows)


def _stage_lines(report: Report) -> list[str]:
    rows = [("stage", "error", "tolerance", "worst element", "got", "expected", "")]
    for stage in report.stages:
        numbers = f"{stage.got:.6g}", f"{stage.expected:.6g}"
        verdict = "" if stage.ok else "FAILED"
        rows.append(
            (
                stage.stage,
                f"{stage.error:.1e}",
                f"{stage.tolerance:.0e}",
                str(list(stage.at)),
                *numbers,
                verdict,
            )
        )
    return _columns(rows)


def _agreement_lines(found: Agreement) -> list[str]:
    lines = [
        f"logits: KL {found.kl_mean:.2e} nats on average, {found.kl_max:.2e} at most (position"
        f" {found.kl_max_position}); top-1 equal for {found.top1:.1%} of {found.tokens} tokens;"
        f" largest difference {found.logit_error:.2e}"
    ]
    for one in found.divergences[:SHOWN]:
        lines.append(
            f"position {one.position}: id {one.got_id} in place of {one.expected_id}, margin {one.margin:.2e},"
            f" noise of the row {one.noise:.2e}: {'near tie' if one.near_tie else 'ERROR'}"
        )
    if len(found.divergences) > SHOWN:
        lines.append(f"and {len(found.divergences) - SHOWN} more divergences")
    return lines


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _layer(text: str) -> int | None:
    from k3mlx.errors import UsageError

    if text == "all":
        return None
    if not text.isdecimal():
        raise UsageError(f"--layer is {text}, expected all or a number")
    return int(text)


def _check_report(path: str | None) -> None:
    from importlib.util import find_spec

    from k3mlx.errors import ResourceError, UsageError

    if path is None:
        return
    if not path.endswith(".png"):
        raise UsageError(f"--report is {path}, expected a file name that ends in .png")
    check_target(path, "--report")
    if find_spec("matplotlib") is None:
        raise ResourceError("--report needs matplotlib: pip install 'k3mlx[report]'")


def _ids(args: argparse.Namespace, vocab_size: int) -> list[int]:
    """What to feed: ids or text as asked for, else a text, else random ids where there is no vocabulary."""
    from k3mlx.checkpoint.hub import resolve
    from k3mlx.errors import UsageError
    from k3mlx.tokenizer import Tokenizer

    from .options import read_prompt

    if args.ids is not None:
        if args.prompt is not None:
            raise UsageError("--ids and --prompt are two prompts: give one of them")
        parts = args.ids.split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise UsageError(f"--ids is {args.ids!r}, expected numbers with commas between them")
        return [int(part) for part in parts]
    folder = resolve(args.model)
    if args.prompt is None and not (folder / "tiktoken.model").exists():
        import numpy as np

        note(f"{folder.name} has no vocabulary: {RANDOM_IDS} random ids")
        return np.random.default_rng(0).integers(0, vocab_size, RANDOM_IDS).tolist()
    text = PROMPT if args.prompt is None else read_prompt(args.prompt)
    return Tokenizer.load(folder, vocab_size=vocab_size).encode(text)
