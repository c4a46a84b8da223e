"""`k3mlx bench` as a user meets it: output, files, parts, and wrong use."""

import json

import pytest

from k3mlx.cli import main

SMALL = ["bench", "-p", "6", "-g", "3", "--backend", "numpy"]
QUICK = [*SMALL, "-n", "3", "--processes", "1"]


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
    assert "one process each: how much processes vary is not known" in out
    assert "differs" not in out
    assert "options:" not in out
    _, out, _ = run(*QUICK, "--io-threads", "2", "--compare", str(file))
    assert "options: io_threads is 2, in the other None" in out


def test_several_processes(byte_model, tmp_path, capfd, monkeypatch):
    """This process opens nothing; what the others measured is compared, process by process."""
    monkeypatch.setattr("k3mlx.cli.bench.open_engine", None)
    file, picture = tmp_path / "a.json", tmp_path / "a.png"
    command = [*SMALL, "-n", "2", "--processes", "2", "--model", str(byte_model)]
    assert main([*command, "--json", str(file), "--report", str(picture)]) == 0
    result = json.loads(file.read_text())
    assert result["figures"]["decode_rate"]["repeats"] == [2, 2]
    assert len(result["trials"]) == 4
    assert (result["options"]["processes"], result["options"]["num_trials"]) == (2, 2)
    assert [one["runs_on"]["backend"] for one in result["processes"]] == ["numpy", "numpy"]
    assert picture.stat().st_size > 0
    out, err = capfd.readouterr()
    assert "routed experts" in out
    assert "process 2 of 2" in err
    assert main([*command, "--json", "-", "--compare", str(file)]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["k3mlx_bench"] == 1
    assert "99% range by how the medians of processes vary" in err


def test_a_fault_in_a_process_is_said_once(byte_model, capfd):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "-p", "499", "--model", str(byte_model)])
    assert ended.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("error: ") == 1
    assert "expected at most 500" in err


@pytest.mark.parametrize(
    ("flags", "processes", "repeats"),
    [([], 5, 3), (["--processes", "1"], 1, 5), (["--context", "9"], 1, 5), (["--expert-trace", "t"], 1, 5),
     (["--processes", "2", "-n", "4"], 2, 4)],
)  # fmt: skip
def test_how_many_processes_and_repeats(monkeypatch, flags, processes, repeats):
    asked = []
    monkeypatch.setattr("k3mlx.cli.bench._check", lambda args: asked.append(args) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*SMALL, *flags])
    assert (asked[0].processes, asked[0].num_trials) == (processes, repeats)


def test_a_rank_of_a_launch_measures_in_one_process(monkeypatch, capsys):
    monkeypatch.setenv("MLX_RANK", "0")
    assert main([*SMALL, "--processes", "2"]) == 2
    assert "--processes is 2, expected 1: the ranks of a launch are one run" in capsys.readouterr().err


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
        (["--processes", "0"], "--processes is 0, expected at least 1"),
        (["--processes", "2", "--cpu"], "--processes is 2, expected 1: parts are measured in one"),
        (["--processes", "2", "--expert-trace", "t"], "expected 1: --expert-trace writes the file of one"),
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
