"""What `--backend`, `--device` and `K3_METAL` mean, with a stand-in for mlx, and that numpy runs without it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from k3mlx import devices
from k3mlx.cli import main
from k3mlx.devices import Choice, choose
from k3mlx.errors import ResourceError, UsageError
from tests.paths import ROOT

NO_GPU = "no Metal or CUDA device"


@pytest.fixture
def fake_mlx(monkeypatch):
    """Call with the device that mlx is to have (or None), and its version; `absent` for no mlx at all."""

    def fake(kind=None, version="0.32.4", absent=False):
        def load(name):
            if absent:
                raise ImportError("No module named 'mlx'")
            asked.append(name)
            return SimpleNamespace(
                __version__=version,
                metal=SimpleNamespace(is_available=lambda: kind == "metal"),
                cuda=SimpleNamespace(is_available=lambda: kind == "cuda"),
            )

        asked = []
        monkeypatch.setattr(devices, "import_module", load)
        monkeypatch.setenv("MLX_ENABLE_TF32", "0")
        return asked

    return fake


def found(*arguments, **environ):
    choice = choose(*arguments, environ)
    return choice.backend, choice.device, choice.kernels


@pytest.mark.parametrize("kind", ["metal", "cuda"])
def test_a_gpu_is_used_where_there_is_one(fake_mlx, kind):
    fake_mlx(kind)
    assert choose(environ={}) == Choice("mlx", kind, kernels=True)
    assert found("mlx", "auto") == found("auto", "gpu") == found("mlx", "gpu") == ("mlx", kind, True)


def test_without_a_gpu_auto_is_numpy_and_says_so(fake_mlx):
    fake_mlx(None)
    choice = choose(environ={})
    assert (choice.backend, choice.device) == ("numpy", "cpu")
    assert len(choice.notes) == 1
    assert NO_GPU in choice.notes[0]
    assert "numpy" in choice.notes[0]
    choice = choose("mlx", environ={})
    assert (choice.backend, choice.device, choice.kernels) == ("mlx", "cpu", False)
    assert "mlx on the CPU" in choice.notes[0]


def test_without_mlx_auto_is_numpy_and_says_so(fake_mlx, monkeypatch):
    fake_mlx(absent=True)
    monkeypatch.setattr("k3mlx.devices.find_spec", lambda name: object())  # installed, but broken
    choice = choose(environ={})
    assert (choice.backend, choice.device) == ("numpy", "cpu")
    assert "mlx cannot be imported" in choice.notes[0]
    assert "numpy on the CPU" in choice.notes[0]
    monkeypatch.setattr("k3mlx.devices.find_spec", lambda name: None)
    assert choose(environ={}).notes == ("mlx is not installed: numpy on the CPU",)
    for arguments, environ in (
        (("mlx", "auto"), {}),
        (("auto", "gpu"), {}),
        (("auto", "auto"), {"K3_METAL": "1"}),
    ):
        with pytest.raises(ResourceError, match="install"):
            choose(*arguments, environ)


@pytest.mark.parametrize("backend", ["auto", "mlx", "numpy"])
def test_k3_metal_1_must_have_metal(fake_mlx, backend):
    fake_mlx("cuda")
    with pytest.raises(ResourceError, match="K3_METAL=1"):
        choose(backend, environ={"K3_METAL": "1"})
    if backend != "numpy":
        fake_mlx("metal")
        assert found(backend, "auto", K3_METAL="1") == ("mlx", "metal", True)
        assert choose(backend, environ={"K3_METAL": "1"}).must
        assert not choose(backend, environ={}).must


def test_k3_metal_0_never_looks_for_a_gpu(fake_mlx):
    asked = fake_mlx("metal")
    assert found("auto", "auto", K3_METAL="0") == ("numpy", "cpu", False)
    assert asked == []
    assert found("mlx", "auto", K3_METAL="0") == ("mlx", "cpu", False)


def test_the_flag_overrides_the_environment(fake_mlx):
    fake_mlx("metal")
    assert found("mlx", "gpu", K3_METAL="0") == ("mlx", "metal", True)
    assert found("mlx", "cpu", K3_METAL="1") == ("mlx", "cpu", False)
    fake_mlx("cuda")
    assert found("auto", "gpu", K3_METAL="1") == ("mlx", "cuda", True)


def test_values_that_mean_nothing():
    with pytest.raises(UsageError, match="K3_METAL is 'yes'"):
        choose(environ={"K3_METAL": "yes"})
    with pytest.raises(UsageError, match="device is 'tpu'"):
        choose("auto", "tpu", {})
    with pytest.raises(UsageError, match="backend is 'torch'"):
        choose("torch", "auto", {})


def test_gpu_that_is_not_there(fake_mlx):
    fake_mlx(None)
    with pytest.raises(ResourceError, match="neither a Metal nor a CUDA device"):
        choose("auto", "gpu", {})
    with pytest.raises(ResourceError, match="numpy backend runs on the CPU"):
        choose("numpy", "gpu", {})


def test_versions_of_mlx(fake_mlx):
    fake_mlx("metal", version="0.32.3")
    with pytest.raises(ResourceError, match=r"mlx is 0\.32\.3, expected at least 0\.32\.4"):
        choose("mlx", environ={})
    fake_mlx("metal", version="0.33.0.dev20261101+abc")
    assert "made for versions below 0.33" in choose("mlx", environ={}).notes[0]
    fake_mlx("metal", version="0.32.10")
    assert choose("mlx", environ={}).notes == ()


def test_10_bit_products_are_off_unless_asked_for(fake_mlx, monkeypatch):
    fake_mlx("metal")
    monkeypatch.delenv("MLX_ENABLE_TF32")
    assert choose("mlx", environ={}).notes == ()
    assert os.environ["MLX_ENABLE_TF32"] == "0"
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    assert "MLX_ENABLE_TF32=1" in choose("mlx", environ={}).notes[0]


def test_command_exits_4_for_metal_that_is_not_there(fake_mlx, byte_model, monkeypatch, capsys):
    fake_mlx(None)
    monkeypatch.setenv("K3_METAL", "1")
    assert main(["generate", "--model", str(byte_model), "--prompt", "x"]) == 4
    assert "K3_METAL=1 asks for Metal, but mlx 0.32.4 has no Metal device here" in capsys.readouterr().err


def test_experts_on_a_gpu_need_one(byte_model, capsys):
    arguments = ["--backend", "numpy", "--experts-device", "gpu", "--prompt", "x"]
    assert main(["generate", "--model", str(byte_model), *arguments]) == 4
    assert "experts_device gpu asks for a GPU" in capsys.readouterr().err


MODULES = """
import sys
import k3mlx
assert not any(name.split(".")[0] == "mlx" for name in sys.modules), "import k3mlx imports mlx"
from k3mlx.cli import main
code = main(sys.argv[1:])
loaded = [name for name in sys.modules if name.split(".")[0] == "mlx"]
assert not loaded, f"the command imported {loaded}"
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("backend", "metal"), [("numpy", ""), ("numpy", "0"), ("auto", "0")], ids=["numpy", "numpy-0", "auto-0"]
)
def test_numpy_runs_import_no_mlx(byte_model, backend, metal):
    command = [sys.executable, "-c", MODULES, "generate", "--model", str(byte_model), "--backend", backend]
    command += ["--prompt", "x", "--raw", "-m", "3", "--json", "-"]
    environ = os.environ | {"K3_METAL": metal}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"]["backend"] == "numpy"


@pytest.mark.skipif(find_spec("mlx") is None, reason="mlx is not installed: pip install 'k3mlx[mlx]'")
def test_unset_says_in_one_line_what_is_used(byte_model):
    command = [sys.executable, "-m", "k3mlx", "generate", "--model", str(byte_model), "--prompt", "x"]
    command += ["--raw", "-m", "2", "--json", "-"]
    environ = {name: value for name, value in os.environ.items() if name != "K3_METAL"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["report"]
    said = [line for line in done.stderr.splitlines() if NO_GPU in line]
    if report["device"] == "cpu":
        assert len(said) == 1
        assert said[0].startswith("k3mlx:")
    else:
        assert report["backend"] == "mlx"
