"""`k3mlx validate` as a user meets it: tables, JSON, the picture, exit codes."""

import json
import shutil
import sys

import pytest

from k3mlx.cli import main


@pytest.fixture
def run(byte_model, capsys):
    def call(*arguments):
        try:
            code = main(["validate", "--model", str(byte_model), *arguments])
        except SystemExit as exit:  # argparse
            code = exit.code
        return code, *capsys.readouterr()

    return call


def test_the_default_compares_what_is_in_use_with_float64(run):
    code, out, err = run()
    assert code == 0
    assert "numpy float32 against numpy float64" in err
    assert (
        "  kda, mla, attn_res_mix, dense_mlp, router, shared_experts, head: numpy on cpu, weights float32"
        in err
    )
    assert "peak memory" in err
    lines = out.splitlines()
    assert lines[0].split() == ["layer", "kind", "worst", "stage", "error", "tolerance", "drift", "rerouted"]
    assert [line.split()[0] for line in lines[1:7]] == ["embedding", "0", "1", "2", "3", "head"]
    assert "top-1 equal for 100.0% of" in out
    assert lines[-1].endswith("0 out of tolerance: ok")


def test_a_failure_names_the_stage_and_exits_with_1(run):
    code, out, _ = run("--ids", "1,2,3,4", "--tolerance", "1e-9")
    assert code == 1
    assert "first out of tolerance: layer 0, " in out
    assert "got" in out
    assert out.rstrip().endswith("FAILED")


def test_one_layer_is_shown_by_stage(run):
    code, out, _ = run("-p", "abc", "--layer", "1", "--token", "1")
    assert code == 0
    assert out.splitlines()[0].split()[0] == "stage"
    assert "logits:" not in out


def test_json_on_stdout_is_the_only_output(run):
    code, out, _ = run("-p", "abcdef", "--json", "-")
    found = json.loads(out)
    assert code == 0
    assert found["passed"] is True
    assert found["first"] is None
    assert found["pieces"] == [4, 1, 1]
    assert found["agreement"]["tokens"] == 6
    stage = found["layers"][1]["stages"][0]
    assert {"layer", "stage", "error", "tolerance", "at", "got", "expected", "ok"} <= stage.keys()
    assert found["peak_memory_bytes"] > 0


def test_two_paths_of_ones_own(run):
    code, _, err = run(
        "--backend", "mlx", "--device", "cpu", "--against", "numpy,experts-kernel=numpy", "--ids", "1,2"
    )
    assert code == 0
    assert "mlx float32 on cpu against numpy float32, 2 tokens" in err


def test_a_model_without_a_vocabulary_gets_random_ids(run, byte_model, tmp_path):
    for file in byte_model.iterdir():
        if file.name != "tiktoken.model":
            shutil.copy(file, tmp_path)
    code, _, err = run("--model", str(tmp_path), "--layer", "0")
    assert code == 0
    assert "has no vocabulary: 64 random ids" in err


def test_picture(run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: report)")
    target = tmp_path / "errors.png"
    assert run("--ids", "1,2,3", "--report", str(target), "--tolerance", "1e-9")[0] == 1
    assert target.read_bytes().startswith(b"\x89PNG")


def test_no_matplotlib_is_said_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("--report", str(tmp_path / "a.png"))
    assert (code, out) == (4, "")
    assert "k3mlx[report]" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layer", "x"],
        ["--layer", "99"],
        ["--ids", "1,x"],
        ["--ids", "1", "-p", "a"],
        ["--against", "numpy,speed=1"],
        ["--against", "nothing"],
        ["--report", "a.pdf"],
        ["--stages", "nothing.*"],
        ["--json", "/nowhere/at/all"],
    ],
)
def test_wrong_usage(run, arguments):
    code, _, err = run(*arguments)
    assert code == 2
    assert err.splitlines()[-1].startswith("k3mlx: error: ")
