"""Kernels that have not passed the self-test: not used, said in one line, or an error where they must be used."""

import pytest

from k3mlx import selftest
from k3mlx.errors import ResourceError
from k3mlx.kernels import mlx_maker
from k3mlx.model.backend import usable_kernels
from k3mlx.selftest import Gate

WHY = "failed its self-test (relative L2 0.3, at most 1e-06)"


@pytest.fixture
def verdict(monkeypatch):
    """Call with the kernels that are to have failed, by stem."""

    class Maker:
        def __init__(self, kind):
            self.name = kind

    def say(disabled):
        monkeypatch.setattr(selftest, "gate", lambda device: Gate(disabled, {"kda_step": 256}, True))
        monkeypatch.setattr(mlx_maker, "MlxMaker", Maker)

    return say


def test_a_kernel_that_failed_is_not_used(verdict):
    verdict({"route_topk": WHY})
    kernels, lines = usable_kernels("metal", wanted=True, must=False)
    assert kernels.disabled == {"route_topk": WHY}
    assert kernels.counters["route_topk"].failures == 0
    assert kernels.threads["kda_step"] == 256
    assert lines == [f"route_topk: plain operations instead of the kernel: {WHY}"]


def test_a_kernel_that_failed_is_an_error_where_metal_must_be_used(verdict):
    verdict({"route_topk": WHY})
    with pytest.raises(ResourceError, match="K3_METAL=1 asks for Metal, but failed its self-test"):
        usable_kernels("metal", wanted=True, must=True)
    verdict({})
    assert usable_kernels("metal", wanted=True, must=True)[1] == []


@pytest.mark.parametrize(("device", "wanted"), [("cpu", True), ("metal", False)])
def test_without_kernels_no_self_test_runs(monkeypatch, device, wanted):
    def fail(device):
        raise AssertionError("the self-test ran")

    monkeypatch.setattr(selftest, "gate", fail)
    kernels, lines = usable_kernels(device, wanted, must=False)
    assert kernels.maker is None
    assert lines == []
