"""Inputs that kernels are proven on, and the verdict over their outputs; used by the self-test and the tests.

Owns the choice of inputs, the float64 expectation from `k3mlx.reference`, and the tolerances:
float32 outputs and states: relative L2 error at most max(2e-6, 3 x the error of the float32 reference);
16-bit outputs: one unit in the last place beyond rounding, on top of that float32 allowance;
windows and ids: exact (ids may swap where two biased scores lie within 1e-6). Runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3mlx.reference import attn_res as reference_attn_res
from k3mlx.reference import kda as reference_kda
from k3mlx.reference import moe as reference_moe
from k3mlx.reference.ops import rms_norm, sigmoid

from . import launch

Floats = NDArray[Any]  # numbers of any dtype
LOWER_BOUND, EPS, L2_EPS = -5.0, 1e-5, 1e-6
FLOAT32_TOLERANCE = 2e-6
SCORE_TOLERANCE = 1e-6
_MANTISSA = {"bfloat16": 8, "float16": 11}
_SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-24}
KDA_KINDS = (
    "plain", "empty", "partial", "saturated", "slow", "parallel", "zero_q", "zero_k", "read_out",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One launch: positional arguments in the order of the launcher, arrays as float32 values.

    `dtypes` names the dtype of each array argument (values are exact in it); `threads` is the threadgroup size.
    """

    stem: str
    label: str
    arguments: tuple[Any, ...]
    dtypes: tuple[str | None, ...]
    dtype: str
    threads: int
    judge: Callable[[Sequence[Floats]], list[Check]]


@dataclass(frozen=True)
class Check:
    """One output compared: `error` and `tolerance` are in the unit that `measure` names."""

    output: str
    measure: str
    error: float
    tolerance: float
    where: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.tolerance)  # NaN fails


def rounded(x: Floats, dtype: str) -> NDArray[np.float32]:
    """float32 values that are exact in `dtype` (round to nearest even)."""
    x = np.asarray(x, np.float32)
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)
    return x


def relative_error(got: Floats, expected: Floats) -> float:
    """L2 norm of the difference over that of the expectation; of the difference alone where that is 0."""
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(got.astype(np.float64) - expected)) / (scale or 1.0)


def compare(name: str, got: Floats, expected: Floats, in_float32: Floats, dtype: str) -> Check:
    """got against the float64 expectation; in_float32 is the float32 reference on the same input."""
    if got.shape != expected.shape:
        return Check(name, "shape", float("nan"), 0.0, f"got {got.shape}, expected {expected.shape}")
    difference = np.abs(got.astype(np.float64) - expected)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(difference), np.inf, difference)), got.shape)
    where = f"{name}{[int(n) for n in worst]}: got {float(got[worst])}, expected {float(expected[worst])}"
    allowed = max(FLOAT32_TOLERANCE, 3 * relative_error(in_float32, expected))
    if dtype == "float32":
        return Check(name, "relative L2", relative_error(got, expected), allowed, where)
    # half an ulp of rounding and one more, on top of what float32 arithmetic may do to a small element
    exponent = np.floor(np.log2(np.maximum(np.abs(expected), np.finfo(np.float64).tiny)))
    ulp = np.maximum(2.0 ** (exponent - _MANTISSA[dtype] + 1), _SMALLEST[dtype])
    floor = allowed * float(np.sqrt(np.mean(expected**2)))
    ulps = (
        float(np.max(np.maximum(difference - floor, 0.0) / ulp)) if not np.isnan(difference).any() else np.nan
    )
    return Check(name, "ulp", ulps, 1.5, where)


def exact(name: str, got: Floats, expected: Floats) -> Check:
    """Equality element by element."""
    same = got.shape == expected.shape and bool(np.array_equal(got, expected))
    return Check(name, "unequal", 0.0 if same else 1.0, 0.0, "" if same else f"{name} differs")


def kda_case(
    stem: str, kind: str = "plain", *, batch: int = 1, tokens: int = 1, heads: int = 1, width: int = 128,
    dtype: str = "float32", threads: int = 1024, conv: int = 4, seed: int = 0,
) -> Case:  # fmt: skip
    """A case of `kda_step` or `kda_prefill`; kinds:

    plain; empty (no history); partial (history of one row); saturated (all decay at the bound); slow (almost
    none); parallel (near-parallel keys, slow, beta near 1); zero_q, zero_k (whole heads of zeros); read_out
    (empty, with norm and gate made transparent, so that the output is the bare read-out).
    """
    rng = np.random.default_rng([seed, batch, tokens, heads, width])
    channels = heads * width

    def normal(*shape: int, scale: float = 1.0) -> Floats:
        return rounded(scale * rng.standard_normal(shape), dtype)

    q, k, v, gate = (normal(batch, tokens, channels) for _ in range(4))
    z = normal(batch, tokens, channels, scale=2.0)
    b = normal(batch, tokens, heads, scale=1.5)
    windows = normal(batch, 3, conv - 1, channels)
    state = normal(batch, heads, width, width, scale=0.5).astype(np.float32)
    taps = (0.5 * rng.standard_normal((3, channels, conv))).astype(np.float32)
    A_log = rng.uniform(-1.0, 1.5, heads).astype(np.float32)
    dt_bias = rng.uniform(-3.0, 3.0, channels).astype(np.float32)
    o_norm = (1 + 0.2 * rng.standard_normal(width)).astype(np.float32)
    eps = EPS
    if kind in ("empty", "read_out"):
        windows, state = np.zeros_like(windows), np.zeros_like(state)
    elif kind == "partial":
        windows[:, :, : conv - 2] = 0
        state[:] = 0
    elif kind == "saturated":
        z = rounded(np.abs(z) + 40, dtype)
    elif kind == "slow":
        z = rounded(-np.abs(z) - 40, dtype)
    elif kind == "parallel":
        k = rounded(np.abs(normal(channels)) + 1 + 1e-3 * k, dtype)
        windows[:, 1] = k[:, :1]
        taps[1] = np.abs(taps[1]) + 0.1
        b = rounded(np.abs(b) + 8, dtype)
        z = rounded(-np.abs(z) - 6, dtype)
    elif kind == "zero_q":
        q[..., :width], windows[:, 0, :, :width] = 0, 0
    elif kind == "zero_k":
        k[..., -width:], windows[:, 1, :, -width:] = 0, 0
    if kind == "read_out":
        eps, gate, o_norm = 1e8, np.full_like(gate, 40), np.full_like(o_norm, 1e4)
    arrays = (q, k, v, z, b, gate, windows, state, taps, A_log, dt_bias, o_norm)

    def judge(outputs: Sequence[Floats]) -> list[Check]:
        wide, narrow = (_kda_reference(arrays, eps, precision) for precision in (np.float64, np.float32))
        out, new_windows, new_state = outputs
        if kind == "read_out" and tokens == 1 and dtype == "float32":
            return [
                _read_out(out, wide[0], q, k, v, b, taps, heads),
                exact("new_windows", new_windows, wide[1]),
            ]
        return [
            compare("out", out, wide[0], narrow[0], dtype),
            exact("new_windows", new_windows, wide[1]),
            compare("new_state", new_state, wide[2], narrow[2], "float32"),
        ]

    label = f"{kind} B{batch} T{tokens} H{heads} D{width}" + (f" W{conv}" if conv != 4 else "")
    dtypes = (dtype,) * 7 + ("float32",) * 5 + (None,) * 3
    return Case(stem, label, (*arrays, LOWER_BOUND, eps, L2_EPS), dtypes, dtype, threads, judge)


def _kda_reference(arrays: Sequence[Floats], eps: float, precision: type) -> list[Floats]:
    """The reference over a batch, which it does not know itself."""
    wide: list[Floats] = [a.astype(precision) for a in arrays]
    taps, A_log, dt_bias, o_norm = wide[8:]
    results = []
    for n in range(len(wide[0])):
        q, k, v, z, b, gate, windows, state = (a[n] for a in wide[:8])
        results.append(
            reference_kda.kda_step(
                q, k, v, z, b, gate, windows, state, taps, A_log, dt_bias, o_norm, LOWER_BOUND, eps, L2_EPS
            )
        )
    return [np.stack(parts) for parts in zip(*results, strict=True)]


def _read_out(
    got: Floats, expected: Floats, q: Floats, k: Floats, v: Floats, b: Floats, taps: Floats, heads: int
) -> Check:
    """One token on an empty state: |o - o64| <= 1e-6 |q| |k| beta |v| element by element."""
    split = (*b.shape[:1], heads, -1)
    active = [u[:, 0].astype(np.float64) * taps[n, :, -1] for n, u in enumerate((q, k, v))]
    q_, k_, v_ = ((a * sigmoid(a)).reshape(split) for a in active)
    norm = [np.sqrt((x**2).sum(-1)) for x in (q_, k_)]
    norm = [n / np.sqrt(n**2 + L2_EPS) for n in norm]
    bound = (norm[0] * q_.shape[-1] ** -0.5 * norm[1] * sigmoid(b[:, 0].astype(np.float64)))[
        ..., None
    ] * np.abs(v_)
    ratio = np.abs(got[:, 0].astype(np.float64) - expected[:, 0]) / np.maximum(
        bound.reshape(got[:, 0].shape), 1e-300
    )
    return Check("out", "of |q||k| beta |v|", float(np.max(ratio)), 1e-6)


def attn_res_case(
    *, frozen: int, tokens: int = 1, width: int = 7168, dtype: str = "float32", threads: int = 512,
    kind: str = "plain", seed: int = 0,
) -> Case:  # fmt: skip
    """A case of `attn_res_mix`; kinds: plain, small (rows near the epsilon), sharp (one source takes all)."""
    rng = np.random.default_rng([seed, frozen, tokens, width])
    scale = 3e-3 if kind == "small" else 1.0
    sources = rounded(scale * rng.standard_normal((frozen + 1, tokens, width)), dtype)
    norm, query, out_norm = (rounded(1 + 0.3 * rng.standard_normal(width), dtype) for _ in range(3))
    query = rounded(
        query * rng.standard_normal(width) * (100.0 if kind == "sharp" else 1.0) / width**0.5, dtype
    )
    blocks, partial = sources[:frozen], sources[frozen]

    def judge(outputs: Sequence[Floats]) -> list[Check]:
        results = []
        for precision in (np.float64, np.float32):
            wide: list[Floats] = [a.astype(precision) for a in (blocks, partial, norm, query, out_norm)]
            mixed = reference_attn_res.attn_res_mix(list(wide[0]), wide[1], wide[2], wide[3], EPS)
            results.append((mixed, rms_norm(mixed, wide[4], EPS)))
        return [
            compare(name, got, results[0][n], results[1][n], dtype)
            for n, (name, got) in enumerate(zip(("mixed", "normed"), outputs, strict=True))
        ]

    arguments = (blocks if frozen else None, partial, norm, query, EPS, out_norm)
    dtypes = (dtype if frozen else None, dtype, dtype, dtype, None, dtype)
    label = f"{kind} N{frozen + 1} T{tokens} D{width}"
    return Case("attn_res_mix", label, arguments, dtypes, dtype, threads, judge)


def route_case(
    *,
    experts: int = 896,
    k: int = 16,
    tokens: int = 1,
    threads: int = 128,
    kind: str = "plain",
    seed: int = 0,
) -> Case:
    """A case of the choice in `route_topk`; kinds: plain, ties (many equal scores), equal (all of them), nan, wide
    (saturated scores, infinite biases)."""
    rng = np.random.default_rng([seed, experts, k, tokens])
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    bias = (0.3 * rng.standard_normal(experts)).astype(np.float32)
    if kind == "ties":
        logits, bias = np.sign(logits), (np.round(2 * bias) / 4).astype(np.float32)
    elif kind == "wide":
        logits = (40 * logits).astype(np.float32)
        bias[[0, -1]] = -np.inf, np.inf
    elif kind == "nan":
        logits[::2, 1::7] = np.nan
        logits[::2, 1::14] = np.copysign(np.float32(np.nan), np.float32(-1))  # the sign must not matter
    elif kind == "equal":
        logits[:], bias[:] = 0.5, 0.25
    scaling = 2.5

    def judge(outputs: Sequence[Floats]) -> list[Check]:
        ids, weights, flags = outputs
        scores = sigmoid(logits.astype(np.float64))
        biased = np.where(np.isnan(scores), -np.inf, scores) + bias
        if kind == "nan":
            expected = np.argsort(-biased, axis=-1, kind="stable")[:, :k]
        else:
            wide = logits.astype(np.float64)
            expected, _ = reference_moe.route_topk(wide, np.eye(experts), bias.astype(np.float64), k, scaling)
        return [
            _check_ids(ids, expected, biased, kind),
            _check_weights(ids, weights, scores, scaling),
            exact("flags", flags, np.array([int(np.isnan(row).any()) for row in logits])),
        ]

    label = f"{kind} T{tokens} E{experts} K{k}"
    return Case(
        "route_topk",
        label,
        (logits, bias, k, scaling),
        ("float32", "float32", None, None),
        "float32",
        threads,
        judge,
    )


def _check_ids(ids: Floats, expected: NDArray[np.intp], biased: Floats, kind: str) -> Check:
    legal = ids.shape == expected.shape and bool(((ids >= 0) & (ids < biased.shape[1])).all())
    if not legal or any(len(set(row)) != len(row) for row in ids.tolist()):
        return Check("ids", "score gap", float("nan"), 0.0, "ids out of range or repeated")
    if kind in ("ties", "equal", "nan"):  # every place is determined
        return exact("ids", ids, expected)
    best, chosen = (np.take_along_axis(biased, n.astype(np.intp), -1) for n in (expected, ids))
    gap = np.where(best == chosen, 0.0, best - np.where(best == chosen, 0.0, chosen))
    worst = np.unravel_index(np.argmax(np.abs(gap)), gap.shape)
    where = f"ids{[int(n) for n in worst]}: got {int(ids[worst])}, expected {int(expected[worst])}"
    return Check("ids", "score gap", float(np.max(np.abs(gap))), SCORE_TOLERANCE, where)


def _check_weights(ids: Floats, weights: Floats, scores: Floats, scaling: float) -> Check:
    safe = np.clip(ids, 0, scores.shape[1] - 1).astype(np.intp)
    chosen = np.take_along_axis(scores, safe, -1)
    expected = chosen / (chosen.sum(-1, keepdims=True) + 1e-20) * scaling
    if not np.array_equal(np.isnan(weights), np.isnan(expected)):
        return Check("weights", "NaN of a chosen NaN", float("nan"), 0.0, "weights are NaN at other places")
    got, expected = np.nan_to_num(weights), np.nan_to_num(expected)
    return Check("weights", "relative L2", relative_error(got, expected), FLOAT32_TOLERANCE)


def failures(checks: Sequence[Check]) -> list[str]:
    """One line for each check that did not pass: tensor, worst index, got, expected, tolerance."""
    return [
        f"{c.output}: {c.measure} {c.error:.3g}, at most {c.tolerance:.3g}; {c.where}"
        for c in checks
        if not c.passed
    ]


def _arguments(case: Case, make: Callable[[Floats, str], Any]) -> list[Any]:
    return [
        argument if dtype is None else make(argument, dtype)
        for argument, dtype in zip(case.arguments, case.dtypes, strict=True)
    ]


def launch_of(case: Case, maker: launch.Maker, make: Callable[[Floats, str], Any]) -> launch.Launch:
    """The launch of a case; `make(values, dtype)` makes the arrays. No dispatch: the kernel that it names."""
    arguments = _arguments(case, make)
    if case.stem == "attn_res_mix":
        return launch.attn_res_mix(maker, case.threads, *arguments)
    if case.stem == "route_topk":
        return launch.route_topk(maker, case.threads, *arguments)
    return launch.kda(case.stem, maker, case.threads, *arguments)


def run_plain(case: Case, make: Callable[[Floats, str], Any]) -> Sequence[Any]:
    """The plain MLX path on a case."""
    from . import plain

    paths: dict[str, Callable[..., Sequence[Any]]] = {
        "attn_res_mix": plain.attn_res_mix,
        "route_topk": plain.select_topk,
    }
    return paths.get(case.stem, plain.kda_step)(*_arguments(case, make))
