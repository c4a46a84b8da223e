"""`k3mlx convert`: dense weights in 4 or 8 bits, in a folder that refers to the snapshot for its experts.

Arguments, progress and the report; the work is `k3mlx.convert`'s.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3mlx.convert.formats import BITS, GROUP_SIZES, PARTS, Formats
from k3mlx.errors import K3Error, UsageError
from k3mlx.memory import format_size, peak_memory_bytes

from .options import check_target, note, write_text
from .progress import StatusLine, duration

if TYPE_CHECKING:
    from k3mlx.checkpoint.manifest import Manifest

HELP = "quantise the dense weights; experts stay where they are"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        "--hf-path",
        help="folder or repo id in the local cache (default: the small K3 in the package)",
    )
    parser.add_argument(
        "--out", "-o", "--mlx-path", required=True, type=_folder, metavar="DIR",
        help="folder to write; of an earlier run: go on with it",
    )  # fmt: skip
    group = parser.add_argument_group("formats (16 bits: as it is)")
    group.add_argument("--bits", "--q-bits", type=int, choices=BITS, default=4, help="default: 4")
    group.add_argument("--q-group-size", type=int, choices=GROUP_SIZES, default=64, help="default: 64")
    for part, what in PARTS.items():
        group.add_argument(f"--{part}-bits", type=int, choices=BITS, help=f"{what} (default: --bits)")
    parser.add_argument("--workers", type=int, metavar="N", help="files at once (default: cores, at most 8)")
    parser.add_argument(
        "--experts-to", type=_folder, metavar="DIR",
        help="also copy the routed experts, in the order in which they are read; the overlay refers to the copy",
    )  # fmt: skip
    parser.add_argument(
        "--model-dirs",
        nargs="+",
        type=_folder,
        default=(),
        metavar="DIR",
        help="folders with more of the shards",
    )
    parser.add_argument(
        "--report", action="store_true",
        help="the error of every tensor and, for a model that fits in memory, agreement on a text",
    )  # fmt: skip
    parser.add_argument("--text", metavar="FILE", help="the text for --report (default: a few paragraphs)")
    parser.add_argument("--json", metavar="FILE|-", help="write what was done as one object; - is stdout")


def run(args: argparse.Namespace) -> int:
    from k3mlx.checkpoint.hub import resolve
    from k3mlx.convert.job import Job
    from k3mlx.kernels.cpu import default_threads

    check_target(args.json, "--json")
    text = _read_text(args.text)
    workers = args.workers if args.workers is not None else min(8, default_threads())
    if workers < 1:
        raise UsageError(f"--workers is {workers}, expected at least 1")
    bits = {part: getattr(args, f"{part}_bits") or args.bits for part in PARTS}
    source = resolve(args.model)
    job = Job(source, args.out, Formats(bits, args.q_group_size), workers, args.experts_to, args.model_dirs)
    started = time.monotonic()
    manifest = _run(job)
    summary = _summary(job.out, manifest, time.monotonic() - started)
    if args.report or args.text:
        summary["agreement"] = _agreement(source, job.out, text)
    if args.json != "-":
        _tell(summary, args.report or bool(args.text))
    if args.json:
        write_text(args.json, json.dumps(summary, indent=1, ensure_ascii=False) + "\n", "--json")
    return 0


def _run(job: Any) -> Manifest:
    progress = ConvertProgress()
    try:
        return job.run(progress)
    except KeyboardInterrupt:
        progress.close()
        note("finished files are kept; the same command goes on from there")
        raise
    finally:
        progress.close()


class ConvertProgress:
    """Told bytes written and bytes to write."""

    def __init__(self) -> None:
        self._line = StatusLine()
        self._started = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if not done or not self._line.due():
            return
        rate = done / max(1e-3, time.monotonic() - self._started)
        self._line.show(
            f"{format_size(done)} of {format_size(total)} written, {done / total:.0%},"
            f" {format_size(round(rate))}/s, {duration((total - done) / rate)} left"
        )

    def close(self) -> None:
        self._line.erase()


def _summary(out: Path, manifest: Manifest, seconds: float) -> dict[str, Any]:
    return {
        "folder": str(out),
        "experts": manifest.experts.absolute,
        "bits": manifest.settings["bits"],
        "group_size": manifest.settings["group_size"],
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files),
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "errors": {name: error for file in manifest.files for name, error in file.errors.items()},
    }


def _agreement(source: Path, out: Path, text: str | None) -> dict[str, Any] | None:
    """What `compare` says, None with a line where it cannot."""
    from k3mlx.convert.agreement import TEXT, compare

    try:
        return compare(source, out, TEXT if text is None else text)._asdict()
    except K3Error as error:
        note(f"k3mlx: not compared on text: {error}")
        return None


def _tell(summary: dict[str, Any], report: bool) -> None:
    errors = summary["errors"]
    if report:
        for name, error in errors.items():
            print(f"{name}  {error:.2%}")
        if errors:
            print(
                f"relative error |W - W'| / |W| of {len(errors)} matrices: worst {max(errors.values()):.2%}"
            )
    if agreement := summary.get("agreement"):
        print(
            f"on {agreement['tokens']} tokens of text: KL to the original {agreement['kl_mean']:.2e} nats"
            f" (at most {agreement['kl_max']:.2e}), the same first choice at {agreement['top1']:.1%}"
        )
    print(
        f"{summary['folder']}: {format_size(summary['bytes'])} in {summary['files']} files;"
        f" experts in {summary['experts']}. Use it with: --model {summary['folder']}"
    )


def _read_text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path}: cannot be read ({error})") from None


def _folder(text: str) -> Path:
    return Path(text).expanduser()
