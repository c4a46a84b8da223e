"""`k3mlx plan`: what a model takes and how fast it would be, here and on common Macs, before anything is downloaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3mlx.errors import UsageError
from k3mlx.memory import format_size, parse_size

from .options import check_target, write_text

if TYPE_CHECKING:
    from k3mlx.planning.outlook import Outlook
    from k3mlx.planning.plan import Case
    from k3mlx.planning.ranks import Link, RanksCase, RanksOutlook

HELP = "what a model takes and how fast it would be, from its configuration alone"
FITS_NOT = 4  # exit code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="folder, overlay or repo id (only its small files are fetched; default: the released Kimi K3, no files)",
    )
    parser.add_argument(
        "--context", type=int, default=8192, metavar="N", help="tokens of a session (default: 8192)"
    )
    parser.add_argument(
        "--memory", default="auto", metavar="SIZE",
        help="of the whole process, e.g. 64GB: also planned for a Mac (default: what this machine has)",
    )  # fmt: skip
    parser.add_argument(
        "--disk-gbps", type=float, metavar="X",
        help="10^9 bytes a second that the disk gives, as k3mlx doctor measures it: also planned for a Mac",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=(), metavar="N",
        help="also plan N machines of each kind together (mlx.launch), e.g. 2 4",
    )  # fmt: skip
    parser.add_argument(
        "--link-gbps", type=float, default=2.5, metavar="X",
        help="10^9 bytes a second between them (default: 2.5, assumed of IP over Thunderbolt)",
    )  # fmt: skip
    parser.add_argument(
        "--link-latency-us", type=float, default=100.0, metavar="X",
        help="10^-6 seconds a message takes before its first byte (default: 100, assumed)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the figures as one object; - is stdout")


def run(args: argparse.Namespace) -> int:
    from k3mlx.planning.outlook import look, macs_for
    from k3mlx.planning.ranks import look_at_ranks

    check_target(args.json, "--json")
    if args.context < 1:
        raise UsageError(f"--context is {args.context}, expected at least 1")
    if args.disk_gbps is not None and not 0 < args.disk_gbps < 1e4:
        raise UsageError(f"--disk-gbps is {args.disk_gbps}, expected a rate above 0 in 10^9 bytes a second")
    memory = None if args.memory == "auto" else parse_size(args.memory, "--memory")
    link = _link(args)
    rate = None if args.disk_gbps is None else args.disk_gbps * 1e9
    outlook = look(args.model, args.context, memory, rate)
    macs = macs_for(memory, rate)
    several = [look_at_ranks(outlook.source, size, args.context, link, macs) for size in args.ranks]
    out = sys.stderr if args.json == "-" else sys.stdout
    print(format_outlook(outlook, args.verbose), file=out)
    for found in several:
        print("\n" + "\n".join(_ranks(found)), file=out)
    if args.json:
        report = outlook.report() | {"several_machines": [found.report() for found in several]}
        write_text(args.json, json.dumps(report, indent=1, ensure_ascii=False) + "\n", "--json")
    return 0 if outlook.fits else FITS_NOT


def _link(args: argparse.Namespace) -> Link:
    from k3mlx.planning.ranks import RANKS_MAX, Link

    for size in args.ranks:
        if not 2 <= size <= RANKS_MAX:
            raise UsageError(f"--ranks is {size}, expected 2 to {RANKS_MAX} machines")
    if not 0 < args.link_gbps < 1e4:
        raise UsageError(f"--link-gbps is {args.link_gbps}, expected a rate above 0 in 10^9 bytes a second")
    if not 0 <= args.link_latency_us < 1e7:
        raise UsageError(f"--link-latency-us is {args.link_latency_us}, expected at least 0 in 10^-6 seconds")
    return Link(args.link_gbps * 1e9, args.link_latency_us * 1e-6)


def format_outlook(outlook: Outlook, verbose: bool = False) -> str:
    """Everything for people; with `verbose` also the terms of each plan."""
    sections = [_disk(outlook), _weights(outlook), _session(outlook), _here(outlook, verbose), _macs(outlook)]
    return "\n\n".join("\n".join(section) for section in sections)


def _disk(outlook: Outlook) -> list[str]:
    rows = [("on disk, bytes", "a layer", "layers", "all")]
    rows += [(row.group, f"{row.per_layer:,}", str(row.layers), f"{row.total:,}") for row in outlook.stored]
    rows += [(name, "", "", f"{size:,}") for name, size in outlook.totals.items()]
    return [f"{outlook.source.name} ({outlook.source.origin})", *_columns(rows)]


def _weights(outlook: Outlook) -> list[str]:
    formats = list(outlook.resident)
    rows = [("dense weights in memory, bytes", *formats)]
    for part in next(iter(outlook.resident.values())):
        rows.append((part, *(f"{outlook.resident[name][part]:,}" for name in formats)))
    totals = {name: sum(parts.values()) for name, parts in outlook.resident.items()}
    rows.append(("all", *(f"{totals[name]:,}" for name in formats)))
    lines = _columns(rows)
    rows = [("memory of the process", *formats)]
    for field, title in (
        ("smallest", "smallest that works"),
        ("resident", "with no dense weights read again"),
        ("recommended", "recommended, two tokens' experts too"),
    ):
        rows.append((title, *(format_size(getattr(outlook.sizes[name], field)) for name in formats)))
    return [*lines, "", *_columns(rows)]


def _session(outlook: Outlook) -> list[str]:
    sizes = outlook.session
    return [
        f"a session of {outlook.context:,} tokens: {sizes['total']:,} bytes (KDA states {sizes['kda_state']:,},"
        f" windows {sizes['kda_windows']:,}, MLA latents {sizes['mla_latents']:,} or"
        f" {sizes['mla_latents_per_token']:,} a token in bf16)",
        f"set aside for it by MLX on a GPU: {format_size(outlook.state)}, with a step's copies, latents in float32",
    ]


def _here(outlook: Outlook, verbose: bool) -> list[str]:
    here = outlook.here
    lines = [f"this machine: {here.name}, disk {_rate(here.rate)}{'' if here.measured else ' (assumed)'}"]
    lines += _table([("", case) for case in here.cases])
    for case in here.cases if verbose else ():
        lines += [f"{case.format}: {line}" for line in (case.plan.lines() if case.plan else ())]
    lines.append(_verdict(here.cases))
    lines.append(f"time outside reads: {here.basis}")
    return lines


def _verdict(cases: Sequence[Case]) -> str:
    from k3mlx.planning.plan import best

    chosen = best(cases)
    if chosen.plan is None:
        return f"will not fit: the smallest memory that works is {format_size(chosen.smallest)} ({chosen.format})"
    as_it_is = cases[0]
    if as_it_is is chosen:
        return f"fits as it is ({chosen.format})"
    how = "fits as it is" if as_it_is.plan else "will not fit as it is"
    return f"{how}; best as {chosen.format}: k3mlx convert --bits {chosen.format.removeprefix('int')}"


def _macs(outlook: Outlook) -> list[str]:
    rows = [(f"{place.name}, {_rate(place.rate)}", place.best) for place in outlook.macs]
    return [
        "Macs, by the format of the dense weights that promises most (estimates; no Mac has been measured by us):",
        *_table(rows),
        *(f"{name}: {text}" for name, text in outlook.basis.items()),
    ]


def _ranks(outlook: RanksOutlook) -> list[str]:
    from k3mlx.planning.ranks import BASIS

    size, link = outlook.size, outlook.link
    lines = [
        f"{size} machines together (estimates), the link {_rate(link.rate)} and {link.latency * 1e6:.3g} us a message:"
    ]
    traffic = [
        ("a token, to each other rank", "messages a layer", "bytes a layer", "messages", "bytes", "time")
    ]
    for dense, paper in outlook.traffic.items():
        traffic.append(
            (
                _SPLIT[dense], str(paper.layer_messages), f"{4 * paper.layer_floats:,}", f"{paper.messages:,}",
                f"{paper.bytes_in(1):,}", f"{paper.seconds(1, size, link) * 1e3:.1f} ms",
            )
        )  # fmt: skip
    rows = [
        ("", "", "dense", "of it on rank 0, others", "slots a layer", "found in memory", "read by a rank, a token",
         "tokens/s", "prompt of 1000"),
        *(_ranks_row(case) for case in outlook.cases),
    ]  # fmt: skip
    owned, busiest = outlook.owned_bytes_per_token, outlook.busiest
    return [
        *lines, *_columns(traffic), "", *_columns(rows),
        f"experts of a token on each rank: {owned:,} bytes, on the busiest of a layer {busiest:.0%} of all",
        f"several machines: {BASIS}",
    ]  # fmt: skip


_SPLIT = {False: "experts spread", True: "and --dense-parallel"}


def _ranks_row(case: RanksCase) -> tuple[str, ...]:
    name = case.machine if not case.dense_parallel else ""
    if case.ranks is None:
        needed = f"will not fit: needs {format_size(case.smallest)}"
        return name, _SPLIT[case.dense_parallel], case.format, needed, "", "", "", "", ""
    first, other = case.ranks
    speed, prompt, read = case.tokens_per_second, case.prompt_seconds, case.bytes_per_token
    return (
        name, _SPLIT[case.dense_parallel], case.format, f"{format_size(first.dense)}, {format_size(other.dense)}",
        f"{first.slots:.1f}, {other.slots:.1f}", f"{first.hits.low:.0%} to {other.hits.high:.0%}",
        f"{format_size(int(read.low))} to {format_size(int(read.high))}", f"{speed.low:.3g} to {speed.high:.3g}",
        f"{_time(prompt.low)} to {_time(prompt.high)}",
    )  # fmt: skip


def _table(cases: Sequence[tuple[str, Case]]) -> list[str]:
    rows = [("", "dense", "memory", "slots a layer", "found in memory", "tokens/s", "prompt of 1000")]
    for name, case in cases:
        if case.plan is None:
            needed = f"will not fit: needs {format_size(case.smallest)}"
            rows.append((name, case.format, needed, "", "", "", ""))
            continue
        hits, speed, prompt = case.hits, case.tokens_per_second, case.prompt_seconds
        dense = case.plan.dense_bytes_per_pass
        rows.append(
            (
                name, case.format, format_size(case.plan.memory), f"{case.slots:.1f}",
                f"{hits.low:.0%} to {hits.high:.0%}", f"{speed.low:.3g} to {speed.high:.3g}",
                f"{_time(prompt.low)} to {_time(prompt.high)}"
                + (f"; {format_size(dense)} of dense weights read at each token" if dense else ""),
            )
        )  # fmt: skip
    return _columns(rows)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligned under the first row; columns of nothing but numbers to the right."""
    columns = list(zip(*rows, strict=True))
    lines = [""] * len(rows)
    for column in columns:
        width = max(map(len, column))
        numbers = all(cell.replace(",", "").replace(".", "").isdigit() for cell in column[1:] if cell)
        for n, cell in enumerate(column):
            lines[n] += (cell.rjust(width) if numbers else cell.ljust(width)) + "  "
    return [line.rstrip() for line in lines]


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )
