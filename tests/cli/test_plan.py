"""`k3mlx plan` as a command: what it prints and writes, every kind of model, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k3mlx.cli import main
from k3mlx.convert.formats import PARTS, Formats
from k3mlx.convert.job import Job
from k3mlx.planning.machines import MACS
from tests import tiny
from tests.checkpoint.test_hub import needs_links, write_cached
from tests.hub_server import HubServer


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict, str]:
    """Exit code, the object of --json, and what was printed for people."""
    code = main(["plan", "--json", "-", *arguments])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else {}, captured.err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(8)
    config = tiny.random_config(rng, hidden_size=64)
    return tiny.write_random_model(tmp_path / "a model ü", config, rng, dtype="BF16", shards=2)


def test_the_release_without_any_files(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, text = planned(capsys, "--memory", "64GB", "--disk-gbps", "5", "--context", "131072")
    assert code == 0
    assert found["model"] == "moonshotai/Kimi-K3"
    assert found["total_bytes"]["text"] == 1_559_965_606_912
    assert found["total_bytes"]["release"] == 1_560_860_324_864
    assert found["session_bytes"]["total"] == 4_073_250_816
    assert set(found["resident_bytes"]) == {"bf16", "int8", "int4"}
    asked, *macs = found["macs"]
    assert asked["machine"] == "a Mac that gives 64 GB"
    assert asked["disk_rate_given"]
    assert [mac["machine"] for mac in macs] == [mac.name for mac in MACS]
    assert not any(mac["disk_rate_given"] for mac in macs)
    (chosen,) = (case for case in asked["formats"] if case["format"] == asked["best"])
    assert chosen["tokens_per_second"][0] < chosen["tokens_per_second"][1]
    assert chosen["memory"]["memory"] == 64 * 10**9
    for expected in ("1,446,456,066,048", "a session of 131,072 tokens", "a Mac that gives 64 GB, 5 GB/s"):
        assert expected in text


def test_what_does_not_fit_is_said_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, text = planned(capsys, "--memory", "1GB")
    assert code == 4
    assert not found["fits"]
    assert "will not fit: the smallest memory that works is " in text
    smallest = min(case["smallest_bytes"] for case in found["this_machine"]["formats"])
    code, found, _ = planned(capsys, "--memory", str(smallest))
    assert code == 0
    assert [case["fits"] for case in found["this_machine"]["formats"]].count(True) >= 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--memory", "much"), "--memory is 'much'"),
        (("--context", "0"), "--context is 0"),
        (("--disk-gbps", "0"), "--disk-gbps is 0.0"),
        (("--disk-gbps", "-3"), "--disk-gbps is -3.0"),
        (("--disk-gbps", "nan"), "--disk-gbps is nan"),
        (("--json", "/no/such/folder/x.json"), "cannot be written"),
        (("--ranks", "1"), "--ranks is 1, expected 2 to 64"),
        (("--ranks", "2", "--link-gbps", "0"), "--link-gbps is 0.0"),
        (("--ranks", "2", "--link-latency-us", "-1"), "--link-latency-us is -1.0"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], expected: str) -> None:
    assert main(["plan", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_several_machines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--memory", "64GB", "--disk-gbps", "5", "--ranks", "2", "4", "--link-gbps", "4")
    code, found, text = planned(capsys, *arguments)
    assert code == 0
    assert [each["ranks"] for each in found["several_machines"]] == [2, 4]
    for each in found["several_machines"]:
        assert each["link_bytes_per_second"] == 4e9
        assert [case["machine"] for case in each["cases"][:2]] == ["a Mac that gives 64 GB"] * 2
        assert len(each["cases"]) == 2 * (1 + len(MACS))
    assert "2 machines together (estimates), the link 4 GB/s and 100 us a message:" in text
    assert "28,800" in text
    assert planned(capsys)[1]["several_machines"] == []


def test_a_folder(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code, found, _ = planned(capsys, "--model", str(model))
    assert code == 0
    index = json.loads((model / "model.safetensors.index.json").read_text())
    assert found["total_bytes"]["text"] == index["metadata"]["total_size"]
    assert "index" not in found["total_bytes"]  # it holds nothing else


def test_a_folder_of_which_only_the_config_is_there(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()
    assert planned(capsys, "--model", str(model))[0] == 0


def test_a_damaged_index_is_not_passed_over(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{")
    assert planned(capsys, "--model", str(model))[0] == 3


def test_an_overlay(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    Job(model, tmp_path / "overlay", Formats(dict.fromkeys(PARTS, 4), 32), 1, None, ()).run()
    code, found, text = planned(capsys, "--model", str(tmp_path / "overlay"))
    assert code == 0
    assert list(found["resident_bytes"]) == ["as stored"]
    assert "an overlay" in text
    whole = planned(capsys, "--model", str(model))[1]["resident_bytes"]
    assert sum(found["resident_bytes"]["as stored"].values()) < sum(whole["int8"].values())


@needs_links
def test_a_cache_entry_by_its_folder_and_by_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = write_cached(tmp_path / "hub")
    by_folder, by_name = (planned(capsys, "--model", name)[1] for name in (str(snapshot), "org/name"))
    assert by_folder["stored_bytes"] == by_name["stored_bytes"]
    assert by_name["origin"] == str(snapshot)


def repository(endpoint: str, cache: Path, *, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """`k3mlx plan --model org/name` in a process of its own, as the client reads its settings once."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "k3mlx", "plan", "--model", "org/name", "--json", "-"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@needs_links
def test_a_repository_of_which_only_small_files_are_fetched(model: Path, tmp_path: Path) -> None:
    with HubServer.running(model) as server:
        done = repository(server.url, tmp_path / "home")
        assert done.returncode == 0, done.stderr
        assert {sent.name for sent in server.sent} == {"config.json", "model.safetensors.index.json"}
    found = json.loads(done.stdout)
    again = repository("http://127.0.0.1:1", tmp_path / "home", offline=True)
    assert again.returncode == 0, again.stderr  # it is in the cache now
    assert json.loads(again.stdout)["stored_bytes"] == found["stored_bytes"]


def test_a_repository_that_cannot_be_had(tmp_path: Path) -> None:
    done = repository("http://127.0.0.1:1", tmp_path / "home", offline=True)
    assert done.returncode == 3
    assert "org/name: config.json and index cannot be fetched" in done.stderr
    assert len(done.stderr.splitlines()) == 1
