"""The launches that judges b and c try: every size of the list, paired with kinds, dtypes and thread counts.

Owns the choice only; what a case holds and when it passes is in `k3mlx.kernels.cases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from k3mlx.kernels.cases import KDA_KINDS, Case, attn_res_case, kda_case, route_case

DTYPES = ("float32", "bfloat16", "float16")
THREADS = (128, 256, 512, 1024)
STEP_TOKENS = (1, 2, 3, 4, 5, 31)
PREFILL_TOKENS = (1, 2, 3, 4, 5, 31, 63, 64, 65)


def kda_step_cases() -> Iterator[Case]:
    count = 0
    for width in (32, 64, 128):
        for tokens in STEP_TOKENS:
            for dtype in DTYPES:
                # co-prime strides through the other lists pair everything with everything over the run
                yield kda_case(
                    "kda_step", KDA_KINDS[count % 9], batch=1 + count % 3, tokens=tokens, heads=(1, 3)[count % 2],
                    width=width, dtype=dtype, threads=THREADS[(count // 3 + count) % 4], seed=count,
                )  # fmt: skip
                count += 1
    for kind in KDA_KINDS:
        tokens = 1 if kind == "read_out" else 5
        yield kda_case("kda_step", kind, batch=2, tokens=tokens, heads=3, width=64, threads=256, seed=7)
        yield kda_case("kda_step", kind, tokens=1, heads=3, width=128, threads=1024, seed=8)
    yield kda_case("kda_step", tokens=3, heads=3, width=32, conv=2, threads=128)
    yield kda_case("kda_step", tokens=3, heads=2, width=128, threads=128)
    for dtype in DTYPES:
        yield kda_case("kda_step", heads=96, dtype=dtype)
    yield kda_case("kda_step", "partial", heads=96, tokens=16, dtype="bfloat16")


def kda_prefill_cases() -> Iterator[Case]:
    count = 0
    for width in (32, 64, 128):
        for tokens in PREFILL_TOKENS:
            yield kda_case(
                "kda_prefill", KDA_KINDS[count % 9], batch=1 + count % 3, tokens=tokens, heads=(1, 3)[count % 2],
                width=width, dtype=DTYPES[(count // 9 + count) % 3], threads=THREADS[(count // 3 + count) % 4],
                seed=count,
            )  # fmt: skip
            count += 1
    for n, kind in enumerate(KDA_KINDS):
        tokens = 1 if kind == "read_out" else 18
        yield kda_case(
            "kda_prefill", kind, batch=2, tokens=tokens, heads=3, width=64, threads=THREADS[n % 4], seed=7
        )
    yield kda_case("kda_prefill", tokens=9, heads=3, width=32, conv=2, threads=128)
    yield kda_case("kda_prefill", tokens=9, heads=2, width=64, threads=128)
    yield kda_case("kda_prefill", heads=96, tokens=16, dtype="bfloat16")
    yield kda_case("kda_prefill", tokens=1000, width=32, threads=128)
    yield kda_case("kda_prefill", tokens=1000, width=64, dtype="bfloat16", threads=512)
    yield kda_case("kda_prefill", "slow", tokens=1000, width=128)


def attn_res_mix_cases() -> Iterator[Case]:
    count = 0
    for frozen in range(9):
        for width in (32, 100, 1000):
            yield attn_res_case(
                frozen=frozen, tokens=(1, 2, 3, 5)[count % 4], width=width, dtype=DTYPES[count // 2 % 3],
                threads=THREADS[count % 4], kind=("plain", "small", "sharp")[count % 3], seed=count,
            )  # fmt: skip
            count += 1
    for dtype in DTYPES:
        yield attn_res_case(frozen=8, tokens=2, dtype=dtype)
    yield attn_res_case(frozen=3, width=7168, threads=1024)


def route_topk_cases() -> Iterator[Case]:
    count = 0
    for experts, k in ((896, 16), (6, 2), (20, 4), (33, 16), (64, 1), (1000, 16), (16, 16)):
        for kind in ("plain", "ties", "wide") + (("nan",) if experts > k + experts // 7 + 1 else ()):
            yield route_case(
                experts=experts,
                k=k,
                tokens=(1, 2, 5)[count % 3],
                kind=kind,
                threads=THREADS[count % 4],
                seed=count,
            )
            count += 1
    for threads in THREADS:
        yield route_case(tokens=2, threads=threads, seed=99)
    yield route_case(experts=300, tokens=3, kind="ties")
    yield route_case(experts=20, k=20, tokens=3, kind="nan")
    yield route_case(experts=129, k=5, tokens=2, kind="wide")
    yield route_case(experts=100, k=40, tokens=2)
    yield route_case(experts=300, kind="equal")


CASES = {
    "kda_step": kda_step_cases,
    "kda_prefill": kda_prefill_cases,
    "attn_res_mix": attn_res_mix_cases,
    "route_topk": route_topk_cases,
}


def gpu_cases(longest: int = 1000) -> Iterator[Case]:
    """Sizes that the emulator leaves out because they take it too long; no longer than `longest` tokens."""

    def kda(stem: str, kind: str = "plain", *, tokens: int = 1, heads: int = 96, **rest: Any) -> Case:
        return kda_case(stem, kind, tokens=min(tokens, longest), heads=heads, **rest)

    for dtype in DTYPES:
        for kind in KDA_KINDS[:-1]:
            yield kda("kda_step", kind, tokens=16, dtype=dtype)
        yield kda("kda_step", batch=3, tokens=31, dtype=dtype, threads=512)
        for tokens in (63, 64, 65):
            yield kda("kda_prefill", "slow", batch=2, heads=3, tokens=tokens, dtype=dtype)
        yield kda("kda_prefill", "saturated", tokens=1000, dtype=dtype)
    for kind in KDA_KINDS[:-1]:
        yield kda("kda_prefill", kind, heads=3, tokens=1000)
    yield kda("kda_step", "read_out")
    yield kda("kda_prefill", "read_out")
    yield attn_res_case(frozen=8, tokens=min(500, longest))
    yield route_case(tokens=min(500, longest))


def bench_cases(longest: int = 2048) -> Iterator[tuple[str, int, tuple[int, ...], Case]]:
    """(name, sets of buffers to rotate through, thread counts to try, case) at the released model's sizes."""
    for stem, tokens, sets, threads in (
        ("kda_step", 1, 16, (256, 512, 1024)),
        ("kda_step", 16, 8, (512, 1024)),
        ("kda_step", 2048, 1, (512, 1024)),
        ("kda_prefill", 2048, 1, (256, 512, 1024)),
    ):
        case = kda_case(stem, heads=96, tokens=min(tokens, longest), dtype="bfloat16")
        yield f"{stem} T{tokens}", sets, threads, case
    for tokens, sets in ((1, 64), (2048, 1)):
        count = min(tokens, longest)
        case = attn_res_case(frozen=8, tokens=count, dtype="bfloat16")
        yield f"attn_res_mix T{tokens}", sets, (256, 512, 1024), case
        yield f"route_topk T{tokens}", sets, (128, 256, 512), route_case(tokens=count)
