"""A fault in one stage of one layer of one path: `validate` names that layer and that stage, and no other layer."""

from pkgutil import resolve_name

import numpy as np
import pytest

from k3mlx.errors import ResourceError
from k3mlx.kernels.cpu import load_cpu_kernels
from k3mlx.validate import parse_spec, validate
from k3mlx.validate.path import REFERENCE, open_path
from tests.tiny import config_dict, write_random_model

from .plant import HEAD, MLX, NATIVE, NUMPY, Planted

TOKENS = 14
PATHS = {
    "numpy": "numpy,dtype=float32,experts_kernel=numpy",
    "mlx": "mlx,device=cpu,dtype=float32,experts_kernel=stream",
    "numpy native": "numpy,dtype=float32,experts_kernel=native",
    "mlx native": "mlx,device=cpu,dtype=float32,experts_kernel=native",
    "mlx-bfloat16": "mlx,device=cpu,dtype=bfloat16",
}
CASES = [("numpy", *case) for case in NUMPY] + [("mlx", *case) for case in MLX]
CASES += [("mlx-bfloat16", *case) for case in MLX[::4]]
CASES += [(name, *case) for name in ("numpy native", "mlx native") for case in NATIVE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(8)
    return write_random_model(tmp_path_factory.mktemp("validate"), config_dict(), rng, dtype="BF16")


@pytest.fixture
def paths(folder, request):
    opened = []

    def open_both(name):
        if "native" in name:
            try:
                load_cpu_kernels()
            except ResourceError as error:
                pytest.skip(str(error))
        for spec in (REFERENCE, parse_spec(PATHS[name])):
            opened.append(open_path(spec, str(folder))[0])
        return opened

    yield open_both
    for path in opened:
        path.close()


IDS = np.random.default_rng(2).integers(0, 60, TOKENS).tolist()


@pytest.mark.parametrize("name", PATHS)
def test_sound_paths_are_within_tolerance(paths, name):
    report = validate(*paths(name), IDS)
    assert report.passed, report.first and report.first.sentence()
    assert report.unseen == []
    assert len(report.stages) > 100


@pytest.mark.parametrize(
    ("name", "where", "fault"), CASES, ids=[f"{name}-{fault.stage}" for name, _, fault in CASES]
)
def test_planted_fault_is_named(paths, monkeypatch, name, where, fault):
    reference, tried = paths(name)
    planted = Planted(tried, where)
    target = f"{fault.owner}.{fault.function}"
    monkeypatch.setattr(target, planted.wrap(resolve_name(target), fault))
    report = validate(reference, planted, IDS)
    first = report.first
    assert first is not None, f"nothing was found: {report.agreement}"
    layer = None if where == HEAD else where
    assert (first.layer, first.stage) == (layer, fault.stage), first.sentence()
    assert {stage.layer for stage in report.stages if not stage.ok} == {layer}
    assert not report.passed
