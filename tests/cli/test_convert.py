"""`k3mlx convert` as a user meets it: flags, report, and every kind of bad input."""

import json
import shutil

import numpy as np
import pytest

from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.checkpoint.quantized import QuantizedInfo
from k3mlx.cli import main
from k3mlx.cli.convert import ConvertProgress


@pytest.fixture
def run(capsys):
    def call(*arguments):
        try:
            code = main(["convert", *map(str, arguments)])
        except SystemExit as exit:  # argparse
            code = exit.code
        return code, *capsys.readouterr()

    return call


def bits_of(folder, name):
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.quantized.get(name)
    return info.bits if isinstance(info, QuantizedInfo) else None


def test_the_shipped_model_and_its_report(run, tmp_path):
    code, out, err = run(
        "-o", tmp_path / "new", "--bits", "8", "--report", "--json", tmp_path / "report.json"
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0, err
    assert "model.layers.3.self_attn.kv_b_proj.weight  0." in out
    assert "relative error |W - W'| / |W| of 93 matrices: worst 0." in out
    assert f"Use it with: --model {tmp_path / 'new'}" in out
    assert len(report["errors"]) == 93
    assert 0 < max(report["errors"].values()) < 0.01
    assert report["agreement"]["top1"] > 0.9
    assert report["bytes"] == sum(path.stat().st_size for path in (tmp_path / "new").glob("dense-*"))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["quantization"] == {
        "mode": "affine",
        "bits": 8,
        "group_size": 64,
        "parts": report["bits"],
    }


def test_generates_from_an_overlay(run, tmp_path, capsys):
    assert run("-o", tmp_path / "new", "--q-bits", "8", "--q-group-size", "32")[0] == 0
    code = main(
        [
            "generate",
            "--model",
            str(tmp_path / "new"),
            "--backend",
            "numpy",
            "-p",
            "Hello, who are you?",
            "-m",
            "20",
        ]
    )
    assert code == 0
    assert capsys.readouterr().out.startswith("I am k3-nano")


def test_bits_of_parts(run, tmp_path):
    code, _, err = run("-o", tmp_path / "new", "--bits", "16", "--mla-bits", "8", "--head-bits", "4")
    assert code == 0, err
    assert bits_of(tmp_path / "new", "lm_head.weight") == 4
    assert bits_of(tmp_path / "new", "model.layers.3.self_attn.o_proj.weight") == 8
    assert bits_of(tmp_path / "new", "model.layers.1.self_attn.o_proj.weight") is None


def test_without_a_vocabulary_the_report_goes_without_text(run, tmp_path, byte_model):
    folder = shutil.copytree(byte_model, tmp_path / "model")
    (folder / "tiktoken.model").unlink()
    code, out, err = run("--model", folder, "-o", tmp_path / "new", "--report")
    assert code == 0
    assert "not compared on text: " in err
    assert "KL" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "--out/-o/--mlx-path"),
        (["-o", "new", "--bits", "3"], 2, "invalid choice"),
        (["-o", "new", "--workers", "0"], 2, "--workers is 0, expected at least 1"),
        (["-o", "new", "--model", "nowhere"], 3, "nowhere: model folder not found"),
        (["-o", "new", "--text", "nothing.txt"], 2, "--text nothing.txt: cannot be read"),
        (["-o", "new", "--json", "no/such/folder.json"], 2, "--json no/such/folder.json: cannot be written"),
    ],
)
def test_bad_input(run, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    got, _, err = run(*arguments)
    assert got == code
    assert message in err
    assert not (tmp_path / "new").exists()


def test_an_interrupt_says_how_to_go_on(run, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("k3mlx.convert.dense.quantize", interrupted)
    code, _, err = run("-o", tmp_path / "new")
    assert code == 130
    assert "finished files are kept; the same command goes on from there" in err


def test_progress_line(capsys):
    progress = ConvertProgress()
    progress(0, 100)
    progress(25_000_000, 100_000_000)
    err = capsys.readouterr().err
    assert err.startswith("25 MB of 100 MB written, 25%, ")
    assert err.endswith(" left\n")
    assert np.char.count(err, "\n") == 1
