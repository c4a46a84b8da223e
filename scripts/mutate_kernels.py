"""Changes kernel texts one place at a time and counts how many changes judges a and b notice.

    python scripts/mutate_kernels.py [kernel ...] [--most 250] [--jobs 2] [--json FILE]

A mutant is the text with one operator, constant, name, condition, barrier or statement changed. It counts if
g++ compiles it; it is caught if the emulator finds a fault, a result leaves its tolerance, or the front end
objects. Survivors are listed with their line. Needs what judges a and b need: g++, binutils, numpy, libclang.
Owns the changes and the count; the judges are in `tests/kernels`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from k3mlx.kernels import KERNELS, kernel_text  # noqa: E402
from k3mlx.kernels.cases import Case, attn_res_case, failures, kda_case, launch_of, route_case  # noqa: E402
from tests.kernels import front_end  # noqa: E402
from tests.kernels.emulated import run  # noqa: E402
from tests.kernels.emulator import Emulator, EmulatorMaker, Finding, array  # noqa: E402
from tests.kernels.emulator.build import CompileError  # noqa: E402
from tests.kernels.texts import generated  # noqa: E402

DEADLINE = 20.0  # seconds for one launch: a changed loop may never end

# pattern -> replacements; each place and each replacement is a mutant of its own
OPERATORS = {
    r"(?<=\w|\)|\]) \+ (?=\S)": [" - "],
    r"(?<=\w|\)|\]) - (?=\S)": [" + "],
    r" \* ": [" / ", " + "],
    r" / ": [" * "],
    r" % ": [" / "],
    r" \+= ": [" -= ", " = "],
    r" \*= ": [" = "],
    r" /= ": [" -= "],
    r" \|= ": [" = "],
    r" < ": [" <= ", " > "],
    r" <= ": [" < "],
    r" > ": [" >= ", " < "],
    r" >= ": [" > "],
    r" == ": [" != "],
    r" != ": [" == "],
    r" && ": [" || "],
    r" \|\| ": [" && "],
    r" \? ([^;?:]+) : ([^;?:]+);": [r" ? \2 : \1;"],
    r"-\(?BLOCK\b|(?<=[(\s])-(?=x\b)": [""],
}
CONSTANTS = {
    r"(?<![\w.])0(?=[\s;,)\]])": ["1"],
    r"(?<![\w.])1(?=[\s;,)\]])": ["0", "2"],
    r"(?<![\w.])2(?=[\s;,)\]])": ["3", "1"],
    r"(?<![\w.])3(?=[\s;,)\]])": ["2", "4"],
    r"(?<![\w.])32(?=[\s;,)\]])": ["16", "31"],
    r"(?<![\w.])0\.0f": ["1.0f"],
    r"(?<![\w.])1\.0f": ["2.0f"],
    r"(?<![\w.])0u": ["1u"],
    r"(?<![\w.])1u": ["0u"],
}
NAMES = [
    ("q", "k"), ("k", "v"), ("v", "z"), ("z", "gate"), ("s_q", "s_k"), ("s_k", "s_v"), ("s_v", "s_o"),
    ("s_read_k", "s_read_q"), ("read_k", "read_q"), ("q_row", "k_row"), ("q_scale", "k_scale"),
    ("q_square", "k_square"), ("q_own", "k_own"), ("head", "batch"), ("row", "column"), ("tokens", "token"),
    ("s_dot", "s_square"), ("dots", "squares"), ("norm", "query"), ("query", "out_norm"), ("blocks", "partial"),
    ("mixed", "normed"), ("frozen", "tokens"), ("logits", "bias"), ("key", "other_key"), ("s_key", "s_id"),
    ("lane", "index"), ("group", "lane"), ("HEADS", "HEAD_DIM"), ("CONV_WIDTH", "HISTORY"), ("THREADS", "HEAD_DIM"),
    ("simd_max", "simd_min"), ("biased", "bits"), ("state", "windows"), ("error", "write"), ("kept", "given"),
    ("dt_bias", "A_log"), ("sum", "sample"),
]  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    line: int
    before: str
    after: str
    header: str
    source: str


def _code_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines()):
        code = line.split("//")[0]
        if code.strip() and not code.lstrip().startswith("#"):
            yield number, code


def _changes(code: str) -> Iterator[str]:
    for pattern, replacements in (OPERATORS | CONSTANTS).items():
        for match in re.finditer(pattern, code):
            for replacement in replacements:
                yield code[: match.start()] + match.expand(replacement) + code[match.end() :]
    for a, b in NAMES:
        for name, other in ((a, b), (b, a)):
            for match in re.finditer(rf"(?<![\w.:]){name}(?!\w)", code):
                yield code[: match.start()] + other + code[match.end() :]
    if match := re.search(r"\bif \((.*)\) \{", code):
        yield code[: match.start(1)] + f"!({match[1]})" + code[match.end(1) :]
    if match := re.search(r"metal::simd_(?:sum|max|min)\(", code):
        yield code[: match.start()] + "(" + code[match.end() :]
    if "threadgroup_barrier" in code:
        yield code.replace("mem_threadgroup)", "mem_device)")
    if re.match(
        r"\s*[\w\[\]. *+%/]+ (?:[-+*/|]?=) [^;]*;\s*$|\s*(?:metal::threadgroup_barrier|\+\+|continue).*;\s*$",
        code,
    ):
        yield ";"  # the statement dropped


def mutants(stem: str) -> list[Mutant]:
    """Every change of the kernel's own text; those of the common header belong to kda_step, which uses all of it."""
    header, source = kernel_text(stem)
    found: dict[tuple[str, str], Mutant] = {}
    for where, text in (("source", source), *([("header", header)] if stem == "kda_step" else [])):
        lines = text.splitlines()
        for number, code in _code_lines(text):
            for change in _changes(code):
                if change == code:
                    continue
                changed = "\n".join([*lines[:number], change, *lines[number + 1 :]]) + "\n"
                both = (changed, source) if where == "header" else (header, changed)
                found.setdefault(both, Mutant(number + 1, code.strip(), change.strip(), *both))
    return list(found.values())


def cases(stem: str) -> list[Case]:
    """A few small launches that between them see every branch; the first ones catch most."""
    if stem == "kda_step":
        return [
            kda_case(stem, batch=2, tokens=3, heads=3, width=32, threads=128),
            kda_case(stem, "partial", tokens=2, heads=3, width=64, threads=512, dtype="bfloat16"),
            kda_case(stem, "saturated", batch=2, tokens=2, width=32, threads=1024),
            kda_case(stem, "zero_q", batch=2, tokens=2, heads=3, width=64, threads=128, conv=2),
            kda_case(stem, "zero_k", tokens=1, width=128, threads=256),
            kda_case(stem, tokens=2, heads=2, width=128, threads=128),
            kda_case(stem, "read_out", tokens=1, heads=3, width=64, threads=128),
        ]
    if stem == "kda_prefill":
        return [
            kda_case(stem, batch=2, tokens=11, heads=3, width=32, threads=128),
            kda_case(stem, "partial", tokens=17, heads=3, width=64, threads=1024, dtype="bfloat16"),
            kda_case(stem, "zero_q", tokens=3, heads=2, width=32, threads=1024, conv=2),
            kda_case(stem, "zero_k", tokens=9, heads=2, width=128, threads=128),
            kda_case(stem, tokens=9, heads=2, width=64, threads=128),
            kda_case(stem, "read_out", tokens=1, heads=3, width=64, threads=256),
        ]
    if stem == "attn_res_mix":
        return [
            attn_res_case(frozen=3, tokens=3, width=100, threads=128),
            attn_res_case(frozen=8, tokens=2, width=300, threads=256, kind="sharp"),
            attn_res_case(frozen=0, tokens=2, width=64, threads=128, dtype="bfloat16"),
            attn_res_case(frozen=8, tokens=1, width=1500, threads=1024, kind="small"),
            attn_res_case(frozen=1, tokens=1, width=129, threads=128),
        ]
    return [
        route_case(experts=300, k=16, tokens=3, threads=128, kind="ties"),
        route_case(experts=20, k=20, tokens=3, threads=128, kind="nan"),
        route_case(experts=896, k=16, tokens=2, threads=256),
        route_case(experts=129, k=5, tokens=2, threads=128, kind="wide"),
        route_case(experts=100, k=40, tokens=2, threads=128),
        route_case(experts=300, k=16, tokens=1, threads=128, kind="equal"),
        route_case(experts=300, k=5, tokens=2, threads=1024, kind="nan"),
    ]


def verdict(stem: str, mutant: Mutant) -> str:
    """`` for a survivor, `compile` for one that does not count, else what caught it."""
    text = (mutant.header, mutant.source)
    maker = EmulatorMaker(Emulator(deadline=DEADLINE, parallel=False), {stem: text})
    for case in cases(stem):
        try:
            outputs = run(case, maker)
        except CompileError:
            return "compile"
        except Finding as finding:
            return finding.kind
        if failures(case.judge(outputs)):
            return "result"
    for case in cases(stem)[:2]:
        threadgroup = launch_of(case, maker, array).threadgroup
        if front_end.findings(generated(case, text), threadgroup):
            return "front end"
    return ""


def _work(job: tuple[str, Mutant]) -> str:
    return verdict(*job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", metavar="kernel", help=", ".join(KERNELS))
    parser.add_argument(
        "--most", type=int, default=250, help="mutants of a kernel at most, drawn with a fixed seed"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write the counts and the survivors to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.kernels) - set(KERNELS):
        parser.error(f"unknown kernel {', '.join(sorted(unknown))}, expected {', '.join(KERNELS)}")
    report = {}
    low = False
    for stem in arguments.kernels or list(KERNELS):
        drawn = mutants(stem)
        total = len(drawn)
        random.Random(1).shuffle(drawn)
        drawn = drawn[: arguments.most]
        unchanged = verdict(stem, Mutant(0, "", "", *kernel_text(stem)))
        if unchanged:
            print(f"{stem}: the judges object to the unchanged text: {unchanged}")
            return 1
        with ProcessPoolExecutor(arguments.jobs) as pool:
            verdicts = list(pool.map(_work, [(stem, mutant) for mutant in drawn]))
        counts: dict[str, int] = {}
        for word in verdicts:
            counts[word] = counts.get(word, 0) + 1
        survivors = [m for m, word in zip(drawn, verdicts, strict=True) if not word]
        counted = len(drawn) - counts.get("compile", 0)
        score = 1 - len(survivors) / counted
        low |= score < 0.95
        caught = {word: n for word, n in sorted(counts.items()) if word not in ("", "compile")}
        print(
            f"{stem}: {counted} mutants that compile of {len(drawn)} drawn from {total}, {score:.1%} caught: {caught}"
        )
        for m in survivors:
            print(f"  line {m.line}: {m.before}  ->  {m.after}", flush=True)
        report[stem] = {
            "counted": counted, "score": score, "caught": caught,
            "survivors": [[m.line, m.before, m.after] for m in survivors],
        }  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
