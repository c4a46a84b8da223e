"""`k3mlx generate --backend mlx`: the same text and the same form of report as numpy."""

import json

import pytest

from k3mlx.cli import main

ARGUMENTS = ["generate", "--prompt", "x", "--raw", "-m", "6", "--temp", "0", "--json", "-"]


@pytest.fixture
def run(byte_model, capsys, monkeypatch):
    monkeypatch.delenv("K3_METAL", raising=False)

    def generate(*more):
        assert main([*ARGUMENTS, "--model", str(byte_model), *more]) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    return generate


def shape(report):
    """Keys at every level; a row of the parts stands for all."""
    if isinstance(report, dict):
        return {key: shape(value) for key, value in report.items() if key not in ("runtime", "memory")}
    return [shape(report[0])] if isinstance(report, list) and report else type(report).__name__


def test_same_text_and_form_of_report(run):
    ours, _ = run("--backend", "mlx", "--device", "cpu")
    numpy, _ = run("--backend", "numpy")
    assert ours["ids"] == numpy["ids"]
    assert ours["text"] == numpy["text"]
    assert shape(ours["report"]) == shape(numpy["report"])
    report = ours["report"]
    assert (report["backend"], report["device"], report["dtype"]) == ("mlx", "cpu", "float32")
    assert report["runtime"]["tf32"] is False
    assert report["seconds"]["attention"] > 0
    assert report["seconds"]["experts"] > 0
    assert (
        0
        < report["runtime"]["evaluation_seconds"]
        < report["seconds"]["prefill"] + report["seconds"]["decode"]
    )
    names = [row["part"] for row in report["parts"]]
    assert names == [row["part"] for row in numpy["report"]["parts"]]
    assert all(row["calls"] > 0 and row["failures"] == row["fallbacks"] == 0 for row in report["parts"])


def test_verbose_says_what_runs_where(run):
    _, said = run(
        "--backend",
        "mlx",
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
        "--experts-kernel",
        "stream",
        "--cpu-threads",
        "2",
        "--verbose",
    )
    lines = said.splitlines()
    assert any("mlx bfloat16 on cpu" in line for line in lines)
    assert any("bfloat16 on the CPU is many times slower" in line for line in lines)
    for part in ("kda", "mla", "attn_res_mix", "router", "experts", "shared_experts", "head"):
        assert sum(line.split()[:1] == [part] for line in lines) == 2, part  # at the start, and with counts
    assert any(line.split()[:2] == ["experts", "cpu"] and "mlx on 2 streams" in line for line in lines)


def test_k3_metal_0_runs_mlx_on_the_cpu(run, monkeypatch):
    monkeypatch.setenv("K3_METAL", "0")
    ours, _ = run("--backend", "mlx")
    assert ours["report"]["device"] == "cpu"
