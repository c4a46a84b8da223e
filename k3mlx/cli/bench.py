"""`k3mlx bench`: speed of the whole model, or of its parts, with the split, the spread, and a word on their worth."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import add_model_options, check_target, engine_arguments, note, open_engine, write_text

if TYPE_CHECKING:
    from k3mlx.bench.result import Figure
    from k3mlx.bench.run import Run
    from k3mlx.engine import Engine

HELP = "measure prompt and decode, where the time goes, and whether the figures are steady"
SPLIT = (
    "Where a token's time goes: in every repeat the rows add up to the whole. A row in brackets lies within or behind"
    " the others: loading of experts that ran behind other work, and Python, which is the time of a forward pass in no"
    " product (an evaluation of MLX, a call of the C kernels, numpy's recurrence, attention and experts) and in no wait"
    " for experts or dense weights. numpy's products with dense weights of its own, those of small models, cannot be"
    " told from Python: then that row is missing."
)
RANGE = (
    "--compare: the repeats of a process share its place in memory, its threads and its moment, so each process counts"
    " once, by the median of its repeats. The range of a ratio is the 99% interval of Student's t on the logarithms of"
    " these medians, with one variance for both results; a difference is a range without 1. More processes make it"
    " narrower. One process each: no measure of how much processes vary, and nothing is called a difference."
)
PROCESSES = 5
REPEATS, REPEATS_EACH = 5, 3  # in one process, in each of several
PAGES, PICTURES = (".html", ".htm"), (".png",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{SPLIT} {RANGE}"
    parser.add_argument("--prompt-tokens", "-p", type=int, default=512, metavar="N", help="default: 512")
    parser.add_argument(
        "--generation-tokens", "-g", type=int, default=64, metavar="N", help="decode steps (default: 64)"
    )
    parser.add_argument(
        "--num-trials",
        "-n",
        type=int,
        metavar="N",
        help=f"repeats after a warm-up, in each process (default: {REPEATS_EACH}, in a single one {REPEATS})",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="fresh processes, one after the other, that each open the model; 1 for a model that takes long to open"
        f" (default: {PROCESSES}; parts are measured in one)",
    )
    parser.add_argument("--one-of-several", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="take the ids from a text (default: random ids, which find fewer experts in memory)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as one object; - is stdout")
    parser.add_argument("--report", metavar="FILE", help=".html or .png with plots (needs matplotlib)")
    parser.add_argument("--compare", metavar="FILE", help="print ratios to the --json of another run")
    _add_parts(parser)
    add_model_options(parser)


def _add_parts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parts (instead of the whole model)")
    group.add_argument(
        "--context",
        type=int,
        nargs="+",
        metavar="N",
        help="attention of a layer after so many tokens, and the sizes of states up to 1M tokens",
    )
    group.add_argument(
        "--streaming",
        nargs="*",
        choices=("rate", "decode", "dense", "prompt"),
        help="reading experts beside plain reads, for a model larger than the cache (default: rate decode)",
    )
    group.add_argument("--cpu", action="store_true", help="the CPU kernels in C; no model needed")
    group.add_argument(
        "--kernels", action="store_true", help="the GPU kernels, on the CPU what stands behind; no model"
    )


def run(args: argparse.Namespace) -> int:
    from k3mlx.bench.compare import compare, differences, unsteady
    from k3mlx.bench.result import figures_of, read_result
    from k3mlx.bench.tables import comparison

    _fill_in(args)
    _check(args)
    if args.one_of_several:
        write_text(args.one_of_several, json.dumps(_measure(args)[0]), "--one-of-several")
        return 0
    other = read_result(args.compare) if args.compare else None
    result, sections = _measure(args) if args.processes == 1 else _measure_in_processes(args)
    figures = figures_of(result, "this result")
    if other is not None:
        ratios = compare(figures, figures_of(other, args.compare))
        sections.append(comparison(ratios, [*unsteady(result, other), *differences(result, other)]))
    text = "\n\n".join(sections)
    print(text, file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        write_text(args.json, json.dumps(result) + "\n", "--json")
    if args.report:
        _write_report(args.report, result, figures, text)
    return 0


def _fill_in(args: argparse.Namespace) -> None:
    """Processes and repeats that were not given: several where that can be."""
    if args.processes is None:
        args.processes = 1 if _single(args) else PROCESSES
    if args.num_trials is None:
        args.num_trials = REPEATS if args.processes == 1 else REPEATS_EACH


def _single(args: argparse.Namespace) -> str:
    """What of the flags, or of the launch, lets only one process measure; empty if nothing does."""
    from k3mlx.ranks.launch import launched_rank

    if not _is_whole(args):
        return "parts are measured in one"
    if args.expert_trace:
        return "--expert-trace writes the file of one"
    return "" if launched_rank() is None else "the ranks of a launch are one run"


def _is_whole(args: argparse.Namespace) -> bool:
    return not (args.cpu or args.kernels or args.context or args.streaming is not None)


def _check(args: argparse.Namespace) -> None:
    from k3mlx.errors import UsageError

    least = {"prompt_tokens": 1, "generation_tokens": 0, "num_trials": 1, "processes": 1}
    for name, low in least.items():
        if getattr(args, name) < low:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is {getattr(args, name)}, expected at least {low}")
    if args.processes > 1 and (why := _single(args)):
        raise UsageError(f"--processes is {args.processes}, expected 1: {why}")
    check_target(args.json, "--json")
    check_target(args.report, "--report")
    if args.report and Path(args.report).suffix.lower() not in (*PAGES, *PICTURES):
        raise UsageError(f"--report {args.report}: expected a name that ends in .html or .png")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, as the result records it."""
    own = (
        "prompt_tokens",
        "generation_tokens",
        "num_trials",
        "processes",
        "text",
        "context",
        "streaming",
        "cpu",
        "kernels",
    )
    asked = {name: getattr(args, name) for name in own} | engine_arguments(args)
    return asked | {"model_dirs": list(args.model_dirs)}


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The parts that the flags name, else the whole model, in this process: the result and its tables."""
    from k3mlx.bench.run import Run
    from k3mlx.selftest import find_device

    bench = Run(_options(args))
    if args.cpu:
        bench.cpu(args.cpu_threads, args.num_trials)
    if args.kernels:
        device = find_device(args.device)
        _need_mlx(device)
        bench.kernels(device, args.num_trials)
    if args.streaming is not None:
        parts = args.streaming or ("rate", "decode")
        bench.streaming(args.model, engine_arguments(args), parts, args.num_trials, args.prompt_tokens)
    if args.context and args.warm_start == "auto":
        args.warm_start = "off"  # experts read in the background would disturb the first rounds
    if _is_whole(args) or args.context:
        with open_engine(args, text=args.text is not None) as engine:
            bench.engine(engine)
            if args.context:
                bench.context(engine, args.context, args.num_trials)
            else:
                _whole(args, bench, engine)
    return bench.result(), bench.sections


def _measure_in_processes(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The whole model in several processes of this command."""
    from k3mlx.bench import tables
    from k3mlx.bench.processes import join, run_processes
    from k3mlx.bench.result import figures_of

    command = [sys.executable, "-m", "k3mlx", *args.argv, "--one-of-several"]
    result = join(run_processes(command, args.processes, lambda line: note(f"k3mlx: {line}")))
    sections = tables.whole(figures_of(result, "this result"), result["peak_memory_bytes"])
    sections += ["\n".join(result["differences"])] if result["differences"] else []
    return result, [*sections, tables.steadiness(result["steady"])]


def _need_mlx(device: str) -> None:
    from k3mlx.errors import ResourceError

    if device == "numpy":
        raise ResourceError(
            "--kernels runs through mlx, which is not installed; --cpu measures the C kernels"
        )


def _whole(args: argparse.Namespace, bench: Run, engine: Engine) -> None:
    from k3mlx.bench.whole import random_ids, text_ids

    count, trials = args.prompt_tokens + args.generation_tokens, args.num_trials
    ids = random_ids(engine.config.vocab_size, count)
    if args.text is not None:
        ids = text_ids(engine.tokenizer.encode(_text(args.text)), count, trials + 1)

    def tell(trial: Any) -> None:
        if args.verbose:
            note(f"prompt {trial.prompt_seconds:.3f} s, decode {trial.decode_seconds:.3f} s")

    bench.whole(engine, ids, args.prompt_tokens, trials, tell)


def _text(path: str) -> str:
    from k3mlx.errors import UsageError

    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}; expected a text file") from None
    except UnicodeDecodeError:
        raise UsageError(f"--text {path}: not UTF-8; convert it first") from None


def _write_report(path: str, result: dict[str, Any], figures: dict[str, Figure], text: str) -> None:
    from k3mlx.bench.page import page
    from k3mlx.bench.plots import write_picture

    if Path(path).suffix.lower() in PICTURES:
        write_picture(path, result, figures)
    else:
        write_text(path, page(result, figures, text), "--report")
