"""`k3mlx doctor` as a user meets it: lines, remedies, exit codes, the object of `--json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3mlx.cli import main
from k3mlx.doctor.diagnosis import Options, diagnose
from tests.checkpoint.damage import shard

from .facts import TRIAL, write_model


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the shipped model, which has its own test, went well."""
    monkeypatch.setattr("k3mlx.doctor.trial.run_trial", lambda backend, device: TRIAL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "a modèle 模型")


def test_the_shipped_model_is_in_good_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "numpy", "--device", "cpu", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("0 fatal")
    for words in (
        "Python",
        "the shipped model runs",
        "experts ",
        "1,002 tensors in 4 files",
        "2,256 ids",
        "it fits",
    ):
        assert words in printed, words


@pytest.mark.usefixtures("no_trial")
def test_everything_wrong_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard(folder, 2).unlink()
    (folder / "tiktoken.model").unlink()
    assert main(["doctor", "--model", str(folder), "--backend", "numpy", "--json", "-"]) == 3
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["exit_code"] == 3
    fatal = {finding["code"]: finding for finding in found["findings"] if finding["level"] == "fatal"}
    assert set(fatal) == {"census", "vocabulary"}
    assert f"{shard(folder, 2)}: shard missing" in fatal["census"]["text"]
    assert fatal["census"]["remedy"] == f"k3mlx download moonshotai/Kimi-K3 --local-dir '{folder}'"
    assert "fatal    census" in printed.err
    assert "2 fatal" in printed.err.splitlines()[-1]


@pytest.mark.usefixtures("no_trial")
def test_a_remedy_that_several_lines_share_is_printed_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        shard(folder, number).unlink()
    assert main(["doctor", "--model", str(folder), "--backend", "numpy"]) == 3
    printed = capsys.readouterr().out
    assert printed.count("shard missing") == 2
    assert printed.count("-> k3mlx download") == 1


@pytest.mark.usefixtures("no_trial")
def test_without_a_model_the_environment_is_still_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "no/such", "--backend", "numpy"]) == 3
    printed = capsys.readouterr().out
    assert "Python" in printed
    assert "Hugging Face cache" in printed
    assert "fatal    model" in printed
    assert "-> download it with: k3mlx download no/such" in printed


@pytest.mark.usefixtures("no_trial")
def test_what_does_not_fit_or_is_not_there_ends_with_4(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--model", str(folder), "--backend", "numpy", "--memory", "1MB"]) == 4
    assert "fatal    memory        will not fit" in capsys.readouterr().out
    monkeypatch.setattr("k3mlx.devices.gpu_kind", lambda mx: None)
    assert main(["doctor", "--model", str(folder), "--device", "gpu"]) == 4
    printed = capsys.readouterr().out
    assert "fatal    device" in printed
    assert "ok       census" in printed  # files are looked at all the same


@pytest.mark.usefixtures("no_trial")
def test_a_bad_setting_ends_with_1_and_stops_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3_DIRECT", "perhaps")
    assert main(["doctor", "--model", str(folder), "--backend", "numpy"]) == 1
    printed = capsys.readouterr().out
    assert "fatal    setting       K3_DIRECT is 'perhaps'" in printed
    assert "ok       memory" in printed


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--memory", "much"]) == 2
    assert main(["doctor", "--model-dirs", str(tmp_path / "none")]) == 2
    assert main(["doctor", "--json", str(tmp_path / "none" / "x")]) == 2
    capsys.readouterr()


@pytest.mark.usefixtures("no_trial")
def test_shards_in_other_folders(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shard(folder, 2).rename(other / shard(folder, 2).name)
    options = Options(str(folder), "numpy", "cpu", model_dirs=(other,))
    found = {finding.code: finding for finding in diagnose(options)}
    assert found["census"].level == "ok"
    assert found["files"].text == "6 files can be read"


@pytest.mark.usefixtures("no_trial")
def test_a_missing_package_is_told_and_ends_the_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3mlx.doctor import diagnosis
    from k3mlx.doctor.packages import Package

    monkeypatch.setattr(diagnosis, "look_at_packages", lambda: [Package("tiktoken", ">=0.9", None, False)])
    codes = [finding.code for finding in diagnose(Options())]
    assert codes[-2:] == ["package", "stopped"]


@pytest.mark.usefixtures("no_trial")
def test_the_self_test_runs_when_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from .facts import selftest_report

    asked = []

    def report(device: str):  # type: ignore[no-untyped-def]
        asked.append(device)
        return selftest_report(device)

    monkeypatch.setattr("k3mlx.selftest.selftest_and_remember", report)
    codes = [f.code for f in diagnose(Options(str(folder), "numpy", "cpu", selftest=True))]
    assert asked == ["numpy"]
    assert "selftest" in codes
