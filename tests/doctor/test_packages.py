"""Findings about packages, BLAS threads, settings and the choice of a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3mlx.devices import Choice
from k3mlx.doctor import packages
from k3mlx.doctor.findings import OK, WARNING
from k3mlx.doctor.packages import (
    Blas,
    check_blas,
    check_choice,
    check_mlx,
    check_packages,
    check_settings,
    look_at_blas,
    look_at_mlx,
    look_at_packages,
    setting_readers,
)

from .facts import MLX, NUMPY


def test_packages_in_good_order_are_one_line() -> None:
    (line,) = check_packages([NUMPY, replace(NUMPY, name="tiktoken", version="0.9")])
    assert line.level == OK
    assert "numpy 2.1.0, tiktoken 0.9" in line.text
    (line,) = check_packages(None)
    assert "not installed" in line.text


@pytest.mark.parametrize(
    ("package", "words"),
    [
        (replace(NUMPY, version=None, fits=False), "numpy is missing, expected >=1.26"),
        (replace(NUMPY, version="1.20", fits=False), "numpy is 1.20, expected >=1.26"),
        (replace(NUMPY, error="libm.so.6 not found"), "numpy 2.1.0 cannot be imported (libm.so.6 not found)"),
    ],
)
def test_a_package_that_is_needed_and_cannot_be_used(package: packages.Package, words: str) -> None:
    _, line = check_packages([package])
    assert words in line.text
    assert line.remedy == "pip install --upgrade 'numpy>=1.26'"


def test_what_is_required_here() -> None:
    found = look_at_packages()
    assert found is not None
    assert {"numpy", "tiktoken", "threadpoolctl"} <= {package.name for package in found}
    assert "mlx" not in {package.name for package in found}
    assert all(package.fits and not package.error for package in found)


def test_a_package_that_breaks_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise OSError("wrong ELF class\nmore")

    monkeypatch.setattr(packages, "version", lambda name: "2.0")
    found = packages._look_at_package("numpy", ">=1", lambda version, prereleases: True, load)
    assert found == packages.Package("numpy", ">=1", "2.0", True, "wrong ELF class")


def test_mlx() -> None:
    absent = replace(MLX, version=None, fits=False)
    assert check_mlx(absent, None, "linux").level == OK
    assert check_mlx(absent, None, "darwin").level == WARNING
    assert "mlx is 0.29" in check_mlx(replace(MLX, version="0.29", fits=False), None, "linux").text
    newer = check_mlx(replace(MLX, version="0.40", fits=False), None, "darwin")
    assert newer.level == WARNING
    assert newer.remedy == "pip install --upgrade 'mlx>=0.32.4,<0.33'"
    broken = check_mlx(replace(MLX, error="no libmlx"), None, "darwin")
    assert "cannot be imported (no libmlx)" in broken.text
    here = check_mlx(MLX, {"device_name": "Apple M4 Max", "memory_size": 1}, "darwin")
    assert "mlx 0.32.4, Apple M4 Max" in here.text
    assert "memory_size: 1" in here.details
    assert look_at_mlx().wanted == MLX.wanted


def test_blas_threads() -> None:
    pool = Blas("openblas", "0.3.30", 4, "/lib/libopenblas.so")
    assert check_blas([pool], 4).level == OK
    many = check_blas([pool], 2)
    assert many.level == WARNING
    assert many.remedy == "set OMP_NUM_THREADS=2"
    assert "Accelerate" in check_blas([], 2).text
    assert all(pool.threads >= 1 for pool in look_at_blas())


def test_settings_are_shown_but_no_secret() -> None:
    environment = {"K3_METAL": "0", "HF_TOKEN": "hf_verysecret", "K3_API_KEY": "alsosecret", "PATH": "/bin"}
    (line,) = check_settings(environment, [])
    assert line.text == "HF_TOKEN=(set), K3_API_KEY=(set), K3_METAL=0"


def test_a_bad_setting_is_told_as_a_run_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_LOAD_THREADS", "many")
    monkeypatch.setenv("K3_EXPERT_GB", "-3")
    texts = [line.text for line in check_settings({}, setting_readers()) if line.code == "setting"]
    assert len(texts) == 2
    assert "K3_LOAD_THREADS is 'many'" in texts[0]
    assert "K3_EXPERT_GB is '-3'" in texts[1]


def test_the_choice_and_its_notes() -> None:
    choice = Choice("mlx", "metal", notes=("a note",))
    assert check_choice("auto", "auto", lambda backend, device: choice) == (
        choice,
        packages.ok("device", "mlx on metal; a note"),
    )
