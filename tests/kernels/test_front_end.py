"""Judge a over every kernel: address spaces, names and limits of the generated text; the CUDA form compiles."""

from __future__ import annotations

import pytest

from k3mlx.kernels import KERNELS, kernel_text
from k3mlx.kernels.cases import Case, launch_of

from . import cuda_text, front_end, sizes
from .emulator import Emulator, EmulatorMaker, array
from .emulator.generate import Generated, generate
from .texts import generated

needs_libclang = pytest.mark.skipif(
    not front_end.AVAILABLE, reason="libclang is not installed: pip install libclang"
)
needs_nvrtc = pytest.mark.skipif(
    cuda_text.nvrtc() is None,
    reason="NVIDIA's compiler is not installed: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl",
)


def different(stem: str, most: int) -> list[Case]:
    """Cases of a kernel whose generated texts differ, at most so many."""
    texts: dict[str, Case] = {}
    for case in sizes.CASES[stem]():
        if len(texts) < most:
            texts.setdefault(generated(case).metal_text(), case)
    return list(texts.values())


@needs_libclang
@pytest.mark.parametrize("stem", KERNELS)
def test_every_generated_text_passes(stem: str) -> None:
    for case in different(stem, 40):
        found = front_end.findings(
            generated(case), launch_of(case, EmulatorMaker(Emulator()), array).threadgroup
        )
        assert not found, f"{case.label} {case.dtype} {case.threads}: {found}"


@needs_nvrtc
@pytest.mark.parametrize("stem", KERNELS)
def test_cuda_form_compiles_without_a_word(stem: str) -> None:
    for case in different(stem, 3):
        code, log = cuda_text.compile_cuda(cuda_text.cuda_text(generated(case, cuda=True)))
        assert code.startswith(b"\x7fELF")
        assert not log.strip("\0 \n"), log


def width_probe(cuda: bool) -> Generated:
    header, source = kernel_text("simd_width", cuda)
    return generate("simd_width", [("sizes", (1,), "int32")], [("width", "int32")], header, source, [])


@needs_libclang
def test_width_probe_passes() -> None:
    assert front_end.findings(width_probe(cuda=False), (64, 1, 1)) == []


@needs_nvrtc
def test_width_probe_compiles_for_cuda() -> None:
    _, log = cuda_text.compile_cuda(cuda_text.cuda_text(width_probe(cuda=True)))
    assert not log.strip("\0 \n"), log


@needs_nvrtc
def test_cuda_compiler_refuses_what_is_wrong() -> None:
    text = cuda_text.cuda_text(generated(next(sizes.CASES["route_topk"]()), cuda=True))
    with pytest.raises(ValueError, match="nowhere"):
        cuda_text.compile_cuda(text.replace("s_score[place]", "nowhere[place]"))


def small(source: str, header: str = "", shape: tuple[int, ...] = (4,)) -> Generated:
    return generate("small", [("a", shape, "float32")], [("o", "float32")], header, source, [])


INDEX = "const int i = int(thread_index_in_threadgroup);\n"
WRONG = {
    "address space of an input": (
        INDEX + "const device float* p = a;\no[i] = p[0];",
        "small inputs in constant",
    ),
    "unqualified pointer": (INDEX + "const float* p = a;\no[i] = p[0];", "small inputs in"),
    "write to an input": (INDEX + "a[i] = 1.0f;", "const"),
    "threadgroup array in a block": (
        INDEX + "if (i < 9) {\n  threadgroup float s[4];\n  s[i] = 1.0f;\n}",
        "scope",
    ),
    "initialiser": (INDEX + "threadgroup float s[2] = {1.0f, 2.0f};\no[i] = s[i];", "initializer"),
    "too much threadgroup memory": (
        INDEX + "threadgroup float s[9000];\ns[i] = 1.0f;\no[i] = s[i];",
        "36000 bytes",
    ),
    "double": (INDEX + "o[i] = float(double(a[0]) * 2);", "double"),
    "literal": (INDEX + "o[i] = a[0] * 2.0;", "literal without f"),
    "static": (INDEX + "static const int x = 4;\no[i] = a[x];", "static local"),
    "lambda": (INDEX + "auto f = [](float x) { return x; };\no[i] = f(a[0]);", "lambda"),
    "fast function": (INDEX + "o[i] = metal::exp(a[0]);", "not metal::precise"),
    "unset scalar": (INDEX + "float x;\nif (i > 3) {\n  x = 1.0f;\n}\no[i] = x;", "uninitialized"),
    "not ASCII": (INDEX + "o[i] = a[0]; // \N{GREEK SMALL LETTER BETA}", "ASCII"),
}


@needs_libclang
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_reported(name: str) -> None:
    source, expected = WRONG[name]
    found = front_end.findings(small(source), (64, 1, 1))
    assert any(expected in line for line in found), found


@needs_libclang
def test_right_text_limits_and_helper_names() -> None:
    helper = "inline float k3_half(float x) {\n  return 0.5f * x;\n}\n"
    text = small(INDEX + "o[i] = k3_half(a[0]);", helper)
    assert front_end.findings(text, (64, 1, 1)) == []
    assert front_end.findings(text, (2048, 1, 1)) == ["2048 threads in a threadgroup, at most 1024"]
    wrong = small(INDEX + "o[i] = lerp(a[0]);", helper.replace("k3_half", "lerp"))
    assert front_end.findings(wrong, (64, 1, 1)) == ["header: lerp does not start with k3_"]
    many = generate(
        "many", [(f"a{n}", (64,), "float32") for n in range(31)], [("o", "float32")], "",
        INDEX + "o[i] = a0[i];", [],
    )  # fmt: skip
    assert front_end.findings(many, (64, 1, 1)) == ["32 buffers, at most 31"]


def test_common_header_is_what_every_kernel_gets() -> None:
    assert len({kernel_text(stem)[0] for stem in KERNELS}) == 1
