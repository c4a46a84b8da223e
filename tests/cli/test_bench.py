"""`k3mlx bench` as a user meets it: output, files, parts, and wrong use."""

import json

import pytest

from k3mlx.cli import main

QUICK = ["bench", "-p", "6", "-g", "3", "-n", "3", "--backend", "numpy"]


@pytest.fixture
def run(byte_model, capsys):
    def call(*arguments, model=byte_model):
        code = main([*arguments, "--model", str(model)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_tables_on_stdout_and_the_result_in_a_file(run, tmp_path):
    file = tmp_path / "a.json"
    code, out, err = run(*QUICK, "--json", str(file))
    assert code == 0
    for words in (
        "prompt: ",
        "decode: ",
        "tokens/s (",
        "routed experts",
        "expert loading, waited for",
        "peak memory",
    ):
        assert words in out, words
    assert "steady" in out.lower()
    assert "numpy float32 on cpu" in err
    result = json.loads(file.read_text())
    assert len(result["figures"]["decode_rate"]["values"]) == 3
    assert result["options"]["prompt_tokens"] == 6
    assert result["runs_on"]["experts"].endswith("mxfp4")
    assert result["machine"]["cores"] > 0
    assert {"k3mlx", "numpy", "python"} <= result["versions"].keys()
    assert result["steady"]["criterion"]
    assert len(result["trials"][0]["step_seconds"]) == 3


def test_json_on_stdout_is_alone(run):
    _, out, err = run(*QUICK, "--json", "-")
    assert json.loads(out)["k3mlx_bench"] == 1
    assert "tokens/s" in err


def test_comparison_with_itself_and_with_other_settings(run, tmp_path):
    file = tmp_path / "a.json"
    run(*QUICK, "--json", str(file))
    _, out, _ = run(*QUICK, "--compare", str(file))
    assert "decode_rate, tokens/s" in out
    assert "options:" not in out
    _, out, _ = run(*QUICK, "--io-threads", "2", "--compare", str(file))
    assert "options: io_threads is 2, in the other None" in out


def test_a_report_of_either_kind(run, tmp_path):
    pytest.importorskip("matplotlib")
    for name, begins in (("a.html", b"<!doctype html>"), ("a.png", b"\x89PNG")):
        run(*QUICK, "--report", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_ids_of_a_text(run, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("so many words " * 4)
    assert run(*QUICK, "--text", str(text))[0] == 0
    text.write_text("short")
    code, _, err = run(*QUICK, "--text", str(text))
    assert code == 2
    assert "expected 36: 9 for each of 4 passes" in err


def test_context(run, tmp_path):
    file = tmp_path / "a.json"
    code, out, _ = run(*QUICK, "--context", "10", "20", "--json", str(file))
    assert code == 0
    assert "MLA cache/layer" in out
    result = json.loads(file.read_text())
    assert {"context_kda_10", "context_mla_20"} <= result["figures"].keys()
    assert "decode_rate" not in result["figures"]
    assert result["context"]["sizes"][-1]["tokens"] <= 1 << 20


def test_streaming(run, tmp_path):
    code, out, _ = run(*QUICK, "--streaming", "rate", "--direct-io", "off")
    assert code == 0
    assert "plain parallel reads" in out


def test_the_c_kernels_need_no_model(capsys, monkeypatch):
    cpu = pytest.importorskip("k3mlx.kernels.cpu")
    from k3mlx import bench_cpu
    from k3mlx.errors import ResourceError

    try:
        cpu.load_cpu_kernels()
    except ResourceError as error:
        pytest.skip(str(error))
    row = bench_cpu.Row("read", 0, 1.0, 10, 1.0, 0)
    monkeypatch.setattr(bench_cpu, "measure", lambda kernels, rounds: [row] * rounds)
    assert main(["bench", "--cpu", "-n", "2", "--model", "/nowhere"]) == 0
    assert capsys.readouterr().out.count("\nread ") == 2


def test_kernels_without_mlx(capsys, monkeypatch):
    monkeypatch.setattr("k3mlx.selftest.find_device", lambda wanted: "numpy")
    assert main(["bench", "--kernels"]) == 4
    assert "--kernels runs through mlx, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "0"], "--prompt-tokens is 0, expected at least 1"),
        (["-g", "-1"], "--generation-tokens is -1"),
        (["-n", "0"], "--num-trials is 0"),
        (["--report", "a.pdf"], "expected a name that ends in .html or .png"),
        (["--json", "/nowhere/a.json"], "cannot be written"),
        (["--compare", "/nowhere/a.json"], "No such file"),
        (["--text", "/nowhere/a.txt"], "expected a text file"),
        (["-p", "499"], "expected at most 500"),
    ],
)
def test_wrong_use(run, arguments, words):
    code, out, err = run(*QUICK, *arguments)
    assert code == 2
    assert words in err
    assert out == ""
    assert len([line for line in err.splitlines() if "error" in line]) == 1
