"""Products of the CPU kernels against float64, for every instruction set of this machine."""

import numpy as np
import pytest

from k3mlx.checkpoint import mxfp4
from k3mlx.errors import ModelFilesError, UsageError
from k3mlx.kernels.cpu import CpuKernels, load_cpu_kernels
from k3mlx.kernels.cpu_matrix import Matrix
from k3mlx.kernels.cpu_verify import decode_affine, random_mxfp4, relative_error, widen_float64

from .conftest import misaligned

TOKENS = (1, 2, 3, 5, 16, 17, 49)
FORMATS = [
    *("mxfp4", "float32", "float16", "bf16"),
    *(
        f"int{bits}-{group}-{scales}"
        for bits in (4, 8)
        for group in (32, 64, 128)
        for scales in ("f", "h", "b")
    ),
]
BF16_OF = {"f": np.float32, "h": np.float16, "b": np.uint16}


def to_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def make(rng: np.random.Generator, name: str, rows: int, cols: int) -> tuple[Matrix, np.ndarray]:
    """A random matrix of a format and its float64 values."""
    if name == "mxfp4":
        packed, scale = random_mxfp4(rng, rows, cols)
        return Matrix.mxfp4(packed, scale), mxfp4.decode(packed, scale, np.float64)
    values = rng.standard_normal((rows, cols))
    if name in ("float32", "float16", "bf16"):
        weight = to_bf16(values) if name == "bf16" else values.astype(name)
        return Matrix.dense(weight), widen_float64(weight)
    bits, group = int(name[3]), int(name.split("-")[1])
    words = rng.integers(0, 1 << 32, (rows, cols * bits // 32), dtype=np.uint32)
    kept_as = BF16_OF[name[-1]]
    parts = [rng.standard_normal((rows, cols // group)) for _ in range(2)]
    scales, biases = (to_bf16(p) if kept_as is np.uint16 else p.astype(kept_as) for p in parts)
    return (
        Matrix.affine(words, scales, biases, bits, group),
        decode_affine(words, scales, biases, bits, group),
    )


def check(kernels: CpuKernels, matrix: Matrix, weight: np.ndarray, x: np.ndarray, what: str) -> np.ndarray:
    """The product, within 1e-6 of float64 and without a poisoned element left."""
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    kernels.matmul(x, matrix, out)
    error = relative_error(out, x, weight)
    assert error <= 1e-6, f"{what} {weight.shape} x {len(x)} tokens: relative error {error:.3g}, allowed 1e-6"
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 128), (33, 640), (70, 4480)])
def test_products_are_float64s_to_a_millionth(kernels, rng, name, rows, cols):
    matrix, weight = make(rng, name, rows, cols)
    for tokens in TOKENS:
        check(kernels, matrix, weight, rng.standard_normal((tokens, cols)).astype(np.float32), name)


@pytest.mark.parametrize("name", ["float32", "float16", "bf16"])
@pytest.mark.parametrize("cols", [1, 3, 31, 33, 515, 1027, 4097])
def test_dense_rows_of_any_length(kernels, rng, name, cols):
    matrix, weight = make(rng, name, 5, cols)
    for tokens in (1, 4, 19):
        check(kernels, matrix, weight, rng.standard_normal((tokens, cols)).astype(np.float32), name)


@pytest.mark.parametrize("cols", [32, 96, 160, 544, 4128])
def test_mxfp4_rows_that_end_inside_a_block(kernels, rng, cols):
    matrix, weight = make(rng, "mxfp4", 7, cols)
    for tokens in (1, 4, 19):
        check(kernels, matrix, weight, rng.standard_normal((tokens, cols)).astype(np.float32), "mxfp4")


@pytest.mark.parametrize("name", ["mxfp4", "int4-64-b", "int8-32-f", "bf16", "float16", "float32"])
def test_bits_depend_neither_on_threads_nor_on_grouping(isa, rng, name):
    matrix, _ = make(rng, name, 200, 1152)
    x = rng.standard_normal((62, 1152)).astype(np.float32)

    def in_parts(threads: int, size: int) -> np.ndarray:
        kernels = load_cpu_kernels(isa, threads)
        return np.concatenate([kernels.matmul(x[i : i + size], matrix) for i in range(0, len(x), size)])

    whole, alone = in_parts(1, len(x)), in_parts(1, 1)
    in_integers = isa == "avx512vnni" and name in ("mxfp4", "int4-64-b")
    assert np.array_equal(whole, alone) != in_integers
    for threads in (1, 2, 3, 8):
        for size in (62, 48, 16, 7, 4, 3):  # none leaves a token over
            assert np.array_equal(in_parts(threads, size), whole), f"{threads} threads, {size} tokens a call"
        assert np.array_equal(in_parts(threads, 1), alone), f"{threads} threads, a token a call"


def spread(rng: np.random.Generator, tokens: int, cols: int) -> np.ndarray:
    """Activations of very different sizes, of which those of a group differ by up to 2^20."""
    return np.ldexp(rng.standard_normal((tokens, cols)), rng.integers(-10, 10, (tokens, cols))).astype(
        np.float32
    )


@pytest.mark.parametrize("name", ["mxfp4", "int4-32-f", "int4-64-b", "int4-128-h"])
def test_a_single_token_of_uneven_activations(kernels, rng, name):
    for cols in (128, 640, 4480):
        matrix, weight = make(rng, name, 70, cols)
        below_two = np.full((1, cols), np.nextafter(np.float32(2), 0))  # the largest mantissa
        for x in (
            spread(rng, 1, cols),
            np.zeros((1, cols)),
            1e-30 * spread(rng, 1, cols),
            1e-32 * spread(rng, 1, cols),
            below_two,
            -below_two,
        ):
            check(kernels, matrix, weight, x.astype(np.float32), f"{name}, uneven")


@pytest.mark.parametrize("name", ["mxfp4", "int4-128-h", "int8-64-b", "bf16"])
def test_the_longest_rows_of_the_model(kernels, rng, name):
    """33,792 columns, those of the dense MLP's down projection, for each way in which tokens are computed."""
    matrix, weight = make(rng, name, 6, 33792)
    for tokens in (1, 3, 18):
        check(kernels, matrix, weight, rng.standard_normal((tokens, 33792)).astype(np.float32), name)


@pytest.mark.parametrize("name", ["mxfp4", "int4-64-f"])
def test_a_single_token_where_integers_cannot_serve(kernels, rng, name):
    """Groups of activations and rows of scales at the ends of the range of float32, beside common ones."""
    matrix, _ = make(rng, name, 70, 640)
    sizes = np.repeat([1, 1e-37, 1e-20, 1e18, 1, 1e-30, 1e30, 1, 1e-44, 1], 64)
    if name == "mxfp4":
        packed, scale = (array.copy() for array in matrix.arrays)
        scale[::3] = rng.integers(0, 40, scale[::3].shape)
        scale[1::7] = rng.integers(140, 160, scale[1::7].shape)
        matrix, weight = Matrix.mxfp4(packed, scale), mxfp4.decode(packed, scale, np.float64)
    else:
        words, scales, biases = (array.copy() for array in matrix.arrays)
        scales[::3] *= np.float32(1e-25)
        scales[1::7] = 0
        biases[::3] *= np.float32(1e-25)
        matrix = Matrix.affine(words, scales, biases, 4, 64)
        weight = decode_affine(words, scales, biases, 4, 64)
    common = rng.standard_normal((1, 640)).astype(np.float32)
    rows = np.abs(weight).max(axis=1) < 1e6  # whose products with the large activations are floats
    for x in (common, (sizes * common).astype(np.float32)):
        got = kernels.matmul(x, matrix)
        assert relative_error(got[:, rows], x, weight[rows]) <= 1e-6


def test_every_code_with_every_scale(kernels):
    """Scale bytes 0 to 254 and all codes in one matrix: row s has scale s, x picks single columns out."""
    codes = np.arange(32, dtype=np.uint8) & 15
    packed = np.tile(codes[::2] | codes[1::2] << 4, (255, 1))
    scale = np.arange(255, dtype=np.uint8)[:, None]
    exact = mxfp4.decode(packed, scale, np.float64)  # [255, 32]
    matrix = Matrix.mxfp4(packed, scale)
    for factor in (1.0, -0.25):  # 0.25 brings the largest values, 6 * 2^127, into the range of float32
        x = (factor * np.eye(32)).astype(np.float32)
        many = kernels.matmul(x, matrix).T
        single = np.stack([kernels.matmul(row, matrix) for row in x], axis=1)
        with np.errstate(over="ignore"):
            expected = (factor * exact).astype(np.float32)
        for got in (many, single):
            wrong = np.argwhere(got != expected)
            assert not len(wrong), f"scale {wrong[0][0]}, code {codes[wrong[0][1]]}: {got[tuple(wrong[0])]}"


def test_extreme_scales_side_by_side(kernels, rng):
    """Groups at both ends of the range in one row; x balances them so that float64 is the judge."""
    packed = rng.integers(0, 256, (40, 16 * 8), dtype=np.uint8)
    scale = np.tile(np.array([0, 1, 2, 127, 200, 252, 253, 254], np.uint8), (40, 1))
    weight = mxfp4.decode(packed, scale, np.float64)
    balance = np.ldexp(1.0, 110 - np.minimum(np.repeat(scale[0].astype(int), 32), 220))
    for tokens in (1, 6, 20):
        x = (balance * rng.standard_normal((tokens, 256))).astype(np.float32)
        check(kernels, Matrix.mxfp4(packed, scale), weight, x, "extreme scales")


def test_subnormals_and_signed_zeros(kernels):
    weight = np.array([[1e-40, -0.0, 0.0, 3e-39], [-1e-45, 1.0, -1.0, 0.0]], np.float32)
    x = np.array([[1e30, -0.0, 5.0, 2e30], [0.0, -0.0, 0.0, -0.0]], np.float32)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    got = kernels.matmul(x, Matrix.dense(weight))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    bits = np.array([[1, 0x8000, 0, 0x807F]], np.uint16)  # subnormal bf16
    np.testing.assert_allclose(
        kernels.matmul(x[0], Matrix.dense(bits)), x[0].astype(np.float64) @ widen_float64(bits)[0], rtol=1e-6
    )


def test_every_half_is_widened_exactly(kernels):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 1)
    one = np.ones((1, 1), np.float32)
    for x in (one, np.ones((20, 1), np.float32)):
        got = kernels.matmul(x, Matrix.dense(halves))
        np.testing.assert_array_equal(got[0], halves[:, 0].astype(np.float32))


@pytest.mark.parametrize("tokens", [1, 3, 18])
def test_scale_byte_255_is_refused(kernels, rng, tokens):
    packed, scale = random_mxfp4(rng, 40, 256)
    packed[33] = 0  # not even a group of zeros hides it
    scale[33, 5] = 255
    x = np.zeros((tokens, 256), np.float32)
    with pytest.raises(ModelFilesError, match=r"255 .* row 33, group 5"):
        kernels.matmul(x, Matrix.mxfp4(packed, scale))


def test_nan_and_infinity_of_the_input_pass_through(kernels, rng):
    matrix, _ = make(rng, "mxfp4", 9, 64)
    x = np.ones((2, 64), np.float32)
    x[1, 3] = np.nan
    got = kernels.matmul(x, matrix)
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1]).all()


def test_no_alignment_is_assumed(kernels, rng):
    packed, scale = random_mxfp4(rng, 45, 288)
    x = rng.standard_normal((6, 288)).astype(np.float32)
    expected = kernels.matmul(x, Matrix.mxfp4(packed, scale))
    for by in (1, 2, 3, 7):
        matrix = Matrix.mxfp4(misaligned(packed, by), misaligned(scale, by))
        assert np.array_equal(kernels.matmul(x, matrix), expected)
    words = rng.integers(0, 1 << 32, (45, 36), dtype=np.uint32)
    scales, biases = (rng.standard_normal((45, 9)).astype(np.float32) for _ in range(2))
    aligned = kernels.matmul(x, Matrix.affine(words, scales, biases, 4, 32))
    odd = [misaligned(a.view(np.uint8), 3).view(a.dtype) for a in (words, scales, biases)]
    assert np.array_equal(kernels.matmul(x, Matrix.affine(*odd, 4, 32)), aligned)
    odd_x = misaligned(x.view(np.uint8), 1).view(np.float32)
    assert np.array_equal(kernels.matmul(odd_x, Matrix.mxfp4(packed, scale)), expected)


def test_rows_may_be_strided(kernels, rng):
    big = rng.standard_normal((60, 300)).astype(np.float32)
    x = rng.standard_normal((3, 2, 400)).astype(np.float32)[..., 100:300]
    view = big[5:50:3, 40:240]
    got = kernels.matmul(x, Matrix.dense(view))
    assert got.shape == (3, 2, 15)
    assert np.array_equal(got, kernels.matmul(x.copy(), Matrix.dense(view.copy())))


def test_fuzz_of_shapes(kernels):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        name = FORMATS[rng.integers(len(FORMATS))]
        unit = (
            1
            if name in ("float32", "float16", "bf16")
            else 32
            if name == "mxfp4"
            else int(name.split("-")[1])
        )
        rows, cols = int(rng.integers(1, 140)), unit * int(rng.integers(1, max(2, 1500 // unit)))
        matrix, weight = make(rng, name, rows, cols)
        x = rng.standard_normal((int(rng.integers(1, 110)), cols)).astype(np.float32)
        check(kernels, matrix, weight, x, f"seed {seed}, {name}")


def test_wrong_arguments_are_refused(kernels, rng):
    packed, scale = random_mxfp4(rng, 4, 64)
    matrix = Matrix.mxfp4(packed, scale)
    with pytest.raises(UsageError, match=r"float64.*expected float32 \[\.\.\., 64\]"):
        kernels.matmul(np.zeros((1, 64)), matrix)
    with pytest.raises(UsageError, match="expected float32"):
        kernels.matmul(np.zeros((1, 65), np.float32), matrix)
    with pytest.raises(UsageError, match="out is"):
        kernels.matmul(np.zeros((2, 64), np.float32), matrix, np.zeros((4, 2), np.float32).T)
    with pytest.raises(UsageError, match=r"expected \[out, in/2\]"):
        Matrix.mxfp4(packed, scale[:, :1])
    with pytest.raises(UsageError, match="not contiguous"):
        Matrix.dense(np.zeros((8, 8), np.float32)[:, ::2])
    with pytest.raises(UsageError, match="groups of 32, 64 or 128"):
        Matrix.affine(np.zeros((4, 8), np.uint32), scale, scale, 4, 16)
    with pytest.raises(UsageError, match="expected both float32"):
        Matrix.affine(np.zeros((4, 8), np.uint32), scale, scale, 4, 32)
    with pytest.raises(UsageError, match="empty"):
        Matrix.dense(np.zeros((0, 8), np.float32))
    with pytest.raises(UsageError, match="at least 1"):
        load_cpu_kernels(threads=0)
