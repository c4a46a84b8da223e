"""Building and loading the library: what is missing is said, what does not fit is refused."""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from k3mlx.errors import ResourceError, UsageError
from k3mlx.kernels import cpu, cpu_build
from k3mlx.kernels.cpu import default_threads, load_cpu_kernels
from k3mlx.kernels.cpu_matrix import Matrix
from k3mlx.kernels.cpu_verify import verify
from tests.paths import ROOT


@pytest.fixture
def fresh_library(monkeypatch):
    """Forget the loaded library for the test, and again after it."""
    cpu.load_library.cache_clear()
    yield monkeypatch
    cpu.load_library.cache_clear()


def test_the_self_check_passes(kernels):
    failed = [check for check in verify(kernels) if not check.ok]
    assert not failed


def test_the_self_check_fails_on_a_wrong_product(kernels, monkeypatch):
    right = cpu.CpuKernels.matmul

    def wrong(self: cpu.CpuKernels, x: np.ndarray, matrix: Matrix) -> np.ndarray:
        out = right(self, x, matrix)
        out[-1, -1] = out[-1, -1] * np.float32(1.001) + np.float32(0.01)
        return out

    monkeypatch.setattr(cpu.CpuKernels, "matmul", wrong)
    others = ("experts_mix", "kda_step", "attend", "attn_res_mix", "rms_norm", "select_topk")
    assert {check.ok for check in verify(kernels) if check.name not in others} == {False}


def test_a_missing_library_says_what_to_do(fresh_library, tmp_path):
    fresh_library.setattr(cpu_build, "LIBRARY", tmp_path / "libk3cpu.so")
    with pytest.raises(ResourceError, match=r"not built .*build_cpu\.py"):
        load_cpu_kernels()


def test_a_library_of_other_sources_is_refused(isa, fresh_library):
    fresh_library.setattr(cpu_build, "source_id", lambda: "other")
    with pytest.raises(ResourceError, match=r"other sources .*build_cpu\.py"):
        load_cpu_kernels()


def test_a_file_that_is_no_library_is_refused(fresh_library, tmp_path):
    path = tmp_path / "libk3cpu.so"
    path.write_bytes(b"nothing")
    fresh_library.setattr(cpu_build, "LIBRARY", path)
    with pytest.raises(ResourceError, match="cannot be loaded"):
        load_cpu_kernels()


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(cpu_build.BuildError, match=r"no C compiler found \(cc, gcc or clang\)"):
        cpu_build.find_compiler()
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(cpu_build.BuildError, match="no-such-compiler"):
        cpu_build.find_compiler()


@pytest.mark.skipif(os.name == "nt", reason="the kernels are not built on Windows")
def test_a_failing_compiler_leaves_the_old_library(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = -dumpmachine ] && echo x86_64-linux-gnu && exit\necho broken; exit 1\n'
    )
    compiler.chmod(0o755)
    target = tmp_path / "libk3cpu.so"
    target.write_bytes(b"old")
    with pytest.raises(cpu_build.BuildError, match="broken"):
        cpu_build.build(target, [str(compiler)])
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cc", "libk3cpu.so"]


@pytest.mark.slow
def test_two_builds_are_the_same_bytes(tmp_path):
    first, second = (cpu_build.build(tmp_path / name / "libk3cpu.so").read_bytes() for name in "ab")
    assert first == second


def test_the_environment_chooses_the_instruction_set(isa, monkeypatch):
    monkeypatch.setenv("K3_CPU_ISA", isa)
    assert load_cpu_kernels().isa == isa
    monkeypatch.setenv("K3_CPU_ISA", "mmx")
    with pytest.raises(ResourceError, match=r"'mmx' do not run here; expected one of .*portable"):
        load_cpu_kernels()


def test_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert default_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "zero")
    assert default_threads() >= 1
    with pytest.raises(UsageError, match="0 CPU threads"):
        load_cpu_kernels(threads=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes(kernels, rng):
    matrix = Matrix.dense(rng.standard_normal((400, 300)).astype(np.float32))
    x = rng.standard_normal((3, 300)).astype(np.float32)
    expected = kernels.matmul(x, matrix)
    child = os.fork()
    if not child:
        os._exit(0 if np.array_equal(kernels.matmul(x, matrix), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(kernels.matmul(x, matrix), expected)


def hook(target: str, version: str = "standard", library: Path | None = None) -> tuple[dict, list[str]]:
    """What the build hook makes of a build, its data and its warnings; `library` stands for a built one."""
    pytest.importorskip("hatchling", reason="hatchling builds the package and is not installed")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "scripts" / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if library:
        module._load = lambda _: SimpleNamespace(build=lambda: library, BuildError=cpu_build.BuildError)
    warnings: list[str] = []
    app = SimpleNamespace(display_warning=warnings.append)
    built = module.CpuKernelsHook(str(ROOT), {}, None, None, "", target, app)
    data: dict = {"force_include": {}}
    built.initialize(version, data)
    return data, warnings


def test_a_build_without_a_compiler_warns_and_goes_on(monkeypatch, tmp_path):
    monkeypatch.delenv("K3_BUILD_CPU", raising=False)
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    data, warnings = hook("wheel")
    assert data == {"force_include": {}}
    assert len(warnings) == 1
    assert "without its CPU kernels" in warnings[0]
    monkeypatch.setenv("K3_BUILD_CPU", "1")
    with pytest.raises(Exception, match="not an executable"):
        hook("wheel")
    monkeypatch.setenv("K3_BUILD_CPU", "0")
    assert hook("wheel") == ({"force_include": {}}, [])


def test_a_wheel_holds_the_library_and_an_sdist_does_not(monkeypatch, tmp_path):
    monkeypatch.delenv("K3_BUILD_CPU", raising=False)
    library = tmp_path / "libk3cpu.so"
    data, warnings = hook("wheel", library=library)
    assert data["force_include"] == {str(library): "k3mlx/kernels/libk3cpu.so"}
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-")
    assert not warnings
    assert hook("sdist", library=library)[0] == {"force_include": {}}
    assert hook("wheel", "editable", library)[0] == {"force_include": {}}
