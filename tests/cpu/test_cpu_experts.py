"""The fused mixture of experts against the reference in float64, and what its bits may not depend on."""

import threading

import numpy as np
import pytest

from k3mlx.checkpoint import mxfp4
from k3mlx.errors import ModelFilesError, UsageError
from k3mlx.kernels import cpu
from k3mlx.kernels.cpu import CpuKernels, load_cpu_kernels
from k3mlx.kernels.cpu_matrix import ExpertRecords, Matrix
from k3mlx.kernels.cpu_verify import random_mxfp4
from k3mlx.reference.moe import mix_experts
from k3mlx.reference.ops import situ, situ_mlp

from .conftest import misaligned

BETA, LINEAR_BETA = 4.0, 25.0


def random_experts(rng: np.random.Generator, count: int, latent: int, inner: int) -> list[tuple]:
    shapes = ((inner, latent), (latent, inner), (inner, latent))
    return [tuple(a for shape in shapes for a in random_mxfp4(rng, *shape)) for _ in range(count)]


def decoded(expert: tuple, dtype: type = np.float64) -> tuple:
    return tuple(mxfp4.decode(expert[i], expert[i + 1], dtype) for i in (0, 2, 4))


class Case:
    """Experts, inputs and a random routing; expert 1 gets no token."""

    def __init__(self, rng: np.random.Generator, latent: int, inner: int, count: int, tokens: int, k: int):
        self.experts = random_experts(rng, count, latent, inner)
        self.x = (rng.standard_normal((tokens, latent)) / np.sqrt(latent)).astype(np.float32)
        others = np.delete(np.arange(count), 1)
        self.ids = np.stack([rng.permutation(others)[:k] for _ in range(tokens)])
        self.weights = rng.random(self.ids.shape).astype(np.float32)
        pairs = [np.nonzero(self.ids == expert) for expert in range(count)]
        self.tokens = [rows for rows, _ in pairs]
        self.token_weights = [self.weights[pair] for pair in pairs]

    def run(
        self, kernels: CpuKernels, part: slice = slice(None), out: np.ndarray | None = None
    ) -> np.ndarray:
        return kernels.experts_mix(
            *(self.x, self.experts[part], self.tokens[part], self.token_weights[part]),
            *(BETA, LINEAR_BETA, out),
        )

    def expected(self) -> np.ndarray:
        wide = [decoded(expert) for expert in self.experts]
        x, weights = self.x.astype(np.float64), self.weights.astype(np.float64)
        return mix_experts(
            x, self.ids, weights, lambda ids: [(int(i), wide[i]) for i in ids], BETA, LINEAR_BETA
        )


@pytest.mark.parametrize(
    ("latent", "inner", "count", "tokens", "k"),
    [(32, 32, 3, 1, 2), (160, 96, 5, 9, 2), (96, 160, 4, 70, 3), (544, 672, 6, 33, 3), (128, 256, 3, 150, 2)],
)
def test_the_mixture_is_the_references(kernels, rng, latent, inner, count, tokens, k):
    case = Case(rng, latent, inner, count, tokens, k)
    got, expected = case.run(kernels), case.expected()
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error <= 1e-6, f"relative error {error:.3g} at {np.abs(got - expected).argmax()}, allowed 1e-6"


def test_a_released_experts_shape(kernels, rng):
    case = Case(rng, 3584, 3072, 3, 3, 2)
    got, expected = case.run(kernels), case.expected()
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


def test_bits_depend_on_neither_threads_nor_calls(isa, rng, monkeypatch):
    case = Case(rng, 160, 224, 7, 60, 4)
    whole = case.run(load_cpu_kernels(isa, threads=1))
    for threads in (1, 2, 3, 8):
        kernels = load_cpu_kernels(isa, threads)
        assert np.array_equal(case.run(kernels), whole), f"{threads} threads"
        out = np.zeros_like(whole)
        for expert in range(7):  # as experts arrive from disk
            case.run(kernels, slice(expert, expert + 1), out)
        assert np.array_equal(out, whole), f"{threads} threads, an expert a call"
    for pairs in (1, 5, 37, 100):
        monkeypatch.setattr(cpu, "INNER_BYTES", 4 * 224 * pairs)
        assert np.array_equal(case.run(kernels), whole), f"{pairs} pairs a batch"


def test_a_tokens_bits_do_not_depend_on_the_other_tokens(kernels, rng):
    case = Case(rng, 96, 128, 5, 40, 2)
    whole = case.run(kernels)
    for token in range(0, 40, 7):
        used = sorted(case.ids[token])

        def first_of(x: np.ndarray, token: int = token, used: list = used) -> np.ndarray:
            experts, weights = [case.experts[e] for e in used], case.weights[token]
            shares = [weights[case.ids[token] == e] for e in used]
            return kernels.experts_mix(x, experts, [np.zeros(1, np.int64)] * 2, shares, BETA, LINEAR_BETA)[0]

        x = case.x[token : token + 1]
        assert np.array_equal(first_of(np.concatenate([x, 1 + x])), whole[token])
        alone = first_of(x)  # may be computed in another way, in which its bits repeat
        assert np.array_equal(alone, first_of(x))
        assert np.abs(alone - whole[token]).max() <= 1e-6 * np.abs(whole[token]).max()


def test_out_is_added_to(kernels, rng):
    case = Case(rng, 64, 96, 3, 4, 1)
    start = rng.standard_normal(case.x.shape).astype(np.float32)
    out = start.copy()
    assert case.run(kernels, out=out) is out
    expected = start + case.expected()
    assert np.abs(out - expected).max() <= 1e-6 * np.abs(expected).max()
    assert not case.run(kernels, slice(0, 0)).any()
    assert not case.run(kernels, slice(1, 2)).any()  # an expert without tokens


def test_rows_of_their_own_sum_to_the_same_bits(kernels, rng):
    """Experts that come in any order: outputs apart, added in the order of ids."""
    case = Case(rng, 64, 96, 5, 7, 3)
    counts = np.array([len(t) for t in case.tokens])
    first = np.concatenate([[0], np.cumsum(counts)])
    rows = [first[e] + np.arange(counts[e]) for e in range(5)]
    apart = np.zeros((first[-1], 64), np.float32)
    for e in (3, 0, 4, 2, 1):
        kernels.experts_mix(
            *(case.x, case.experts[e : e + 1], case.tokens[e : e + 1], case.token_weights[e : e + 1]),
            *(BETA, LINEAR_BETA, apart, rows[e : e + 1]),
        )
    out = np.zeros_like(case.x)
    for e in range(5):
        out[case.tokens[e]] += apart[rows[e]]
    assert np.array_equal(out, case.run(kernels))
    few = np.zeros((5, 64), np.float32)
    rest = (case.x, case.experts, case.tokens, case.token_weights, BETA, LINEAR_BETA, few)
    with pytest.raises(UsageError, match=r"rows 0 to \d+; expected 0 to 4"):
        kernels.experts_mix(*rest, rows)


def test_experts_at_odd_addresses(kernels, rng):
    case = Case(rng, 96, 64, 4, 5, 2)
    expected = case.run(kernels)
    case.experts = [tuple(misaligned(a, 1 + i) for i, a in enumerate(e)) for e in case.experts]
    assert np.array_equal(case.run(kernels), expected)


def gated(kernels: CpuKernels, x: np.ndarray, gate: Matrix, up: Matrix, down: Matrix) -> np.ndarray:
    return kernels.situ_mlp(x, ExpertRecords.of((gate, down, up)), BETA, LINEAR_BETA)


@pytest.mark.parametrize("apart", [False, True])
def test_a_token_of_its_own(kernels, rng, apart):
    """The short way for one token gives the bits of the general one."""
    case = Case(rng, 96, 160, 5, 1, 4)
    used = sorted(case.ids[0])
    weights = np.array([case.weights[0][case.ids[0] == e][0] for e in used], np.float32)
    records = [ExpertRecords.of(case.experts[e]) for e in used]
    got = kernels.mix_token(case.x, records, weights, BETA, LINEAR_BETA, apart=apart)
    assert got.shape == (len(used) if apart else 1, 96)
    whole = case.run(kernels)
    assert np.array_equal(np.add.reduce(got) if apart else got[0], whole[0])
    assert not kernels.mix_token(case.x, [], weights[:0], BETA, LINEAR_BETA).any()
    with pytest.raises(UsageError, match=r"expected float32 \[1, L\]"):
        kernels.mix_token(case.x, records, weights[1:], BETA, LINEAR_BETA)


@pytest.mark.parametrize("kept_as", [np.float32, np.float16])
def test_an_mlp_of_dense_matrices(kernels, rng, kept_as):
    gate, up = (rng.standard_normal((50, 35)).astype(kept_as) for _ in range(2))
    down = rng.standard_normal((35, 50)).astype(kept_as)
    x = rng.standard_normal((21, 35)).astype(np.float32)
    got = gated(kernels, x, *(Matrix.dense(w) for w in (gate, up, down)))
    wide = [a.astype(np.float64) for a in (x, gate, up, down)]
    expected = situ_mlp(*wide, BETA, LINEAR_BETA)
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


def test_nothing_of_an_earlier_call_is_left(kernels, rng):
    """A call with NaN fills the working buffers; the next one's rows end inside a block of theirs."""
    wide = [Matrix.dense(np.ones(shape, np.float32)) for shape in ((256, 40), (256, 40), (40, 256))]
    gated(kernels, np.full((3, 40), np.nan, np.float32), *wide)
    narrow = [Matrix.dense(np.ones(shape, np.float32)) for shape in ((35, 33), (35, 33), (33, 35))]
    assert np.isfinite(gated(kernels, np.ones((3, 33), np.float32), *narrow)).all()


def test_matrices_of_different_formats(kernels, rng):
    """Int4 gate and up, MXFP4 down: the inner values are reordered for the format that reads them."""
    packed, scale = random_mxfp4(rng, 64, 160)
    down = mxfp4.decode(packed, scale, np.float64)
    gate, up = (rng.standard_normal((160, 64)).astype(np.float32) for _ in range(2))
    x = rng.standard_normal((3, 64)).astype(np.float32)
    got = gated(kernels, x, Matrix.dense(gate), Matrix.dense(up), Matrix.mxfp4(packed, scale))
    expected = situ_mlp(*(a.astype(np.float64) for a in (x, gate, up, down)), BETA, LINEAR_BETA)
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


def test_situ_over_its_whole_range(kernels):
    """w1 and w3 pick gate and up out of x, w2 passes the value on: SiTU alone, at 4 ulp of float32."""
    values = np.concatenate([10.0 ** np.arange(-44, 38, 0.37), np.arange(0, 120, 1.7)])
    values = np.concatenate([values, -values]).astype(np.float32)
    gate, up = (grid.ravel() for grid in np.meshgrid(values, values[::7]))
    w1, w3 = Matrix.dense(np.array([[1, 0]], np.float32)), Matrix.dense(np.array([[0, 1]], np.float32))
    w2 = Matrix.dense(np.array([[1], [0]], np.float32))
    x = np.stack([gate, up], axis=1)
    got = gated(kernels, x, w1, w3, w2)[:, 0]
    expected = situ(gate.astype(np.longdouble), up.astype(np.longdouble), BETA, LINEAR_BETA)
    # the reference's sigmoid cancels for very negative gates: take it from exp there
    small = gate < -20
    wide_gate, wide_up = gate[small].astype(np.longdouble), up[small].astype(np.longdouble)
    expected[small] = (
        BETA * np.tanh(wide_gate / BETA) * np.exp(wide_gate) * LINEAR_BETA * np.tanh(wide_up / LINEAR_BETA)
    )
    # exp is not followed below e^-87: there the result is 0 to 2e-36
    excess = np.abs(got - expected) - 5e-7 * np.abs(expected) - 2e-36
    worst = int(excess.argmax())
    assert excess[worst] <= 0, f"SiTU({gate[worst]}, {up[worst]}): {got[worst]}, expected {expected[worst]}"


@pytest.mark.parametrize("part", [1, 3, 5])
def test_a_damaged_scale_is_named(kernels, rng, part):
    case = Case(rng, 64, 96, 4, 6, 2)
    expert = int(case.ids[0, 0])
    case.experts[expert][part - 1][7, 16:32] = (
        0x22  # nothing but ones: infinity instead of NaN would pass SiTU
    )
    case.experts[expert][part][7, 1] = 255
    case.x = np.abs(case.x)
    with pytest.raises(
        ModelFilesError, match=rf"w{(part + 1) // 2} scale of expert {expert} .* row 7, group 1"
    ):
        case.run(kernels)


def test_wrong_arguments_are_refused(kernels, rng):
    case = Case(rng, 64, 96, 3, 4, 2)
    with pytest.raises(UsageError, match=r"expected float32 \[T, L\]"):
        kernels.experts_mix(
            case.x.astype(np.float64), case.experts, case.tokens, case.token_weights, 4.0, 25.0
        )
    with pytest.raises(UsageError, match=r"with L = 32"):
        kernels.experts_mix(case.x[:, :32], case.experts, case.tokens, case.token_weights, 4.0, 25.0)
    with pytest.raises(UsageError, match="tokens 0 to 9; expected 0 to 3"):
        kernels.experts_mix(case.x, case.experts[:1], [np.array([0, 9])], [np.ones(2)], 4.0, 25.0)
    with pytest.raises(UsageError, match="as many weights as tokens"):
        kernels.experts_mix(case.x, case.experts[:1], [np.array([0, 1])], [np.ones(1)], 4.0, 25.0)
    with pytest.raises(UsageError, match=r"number \[3, 2, 3, 2\]"):
        kernels.experts_mix(case.x, case.experts, case.tokens[:2], case.token_weights, 4.0, 25.0)
    odd = list(case.experts)
    odd[2] = (odd[2][0][:, ::-1], *odd[2][1:])
    with pytest.raises(UsageError, match="are not contiguous"):
        kernels.experts_mix(case.x, odd, case.tokens, case.token_weights, 4.0, 25.0)
    with pytest.raises(UsageError, match="6 MXFP4 arrays or 3 matrices"):
        kernels.experts_mix(case.x, [(1, 2)], [np.array([0])], [np.ones(1)], 4.0, 25.0)


def test_python_threads_take_turns(kernels, rng):
    cases = [Case(np.random.default_rng(seed), 96, 128, 4, 9, 2) for seed in range(4)]
    expected = [case.run(kernels) for case in cases]
    wrong = []

    def work(number: int) -> None:
        for turn in range(20):
            one = load_cpu_kernels(
                kernels.isa, threads=1 + (number + turn) % 3
            )  # the pool changes size under way
            if not np.array_equal(cases[number].run(one), expected[number]):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
