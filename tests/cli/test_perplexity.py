"""`k3mlx perplexity` as a user meets it."""

import io
import json
import sys

import pytest

from k3mlx.cli import main

TEXT = "The quick brown fox jumps over the lazy dog. Grüße! " * 3


@pytest.fixture
def run(byte_model, capsys, monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")

    def call(*arguments, file=None, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = main(
                ["perplexity", file or str(tmp_path / "text.txt"), "--model", str(byte_model), *arguments]
            )
        except SystemExit as exit:  # argparse
            code = exit.code
        return code, *capsys.readouterr()

    return call


def test_figures_on_stdout(run):
    code, out, _ = run()
    assert code == 0
    count = len(TEXT.encode()) - 1
    assert "nats per token (perplexity" in out
    assert f"{count} tokens, {count} bytes in 1 windows" in out


def test_json_on_stdout_is_the_only_output(run):
    code, out, _ = run("--json", "-", "--window", "40", "--stride", "10")
    found = json.loads(out)
    assert code == 0
    assert found["scored_tokens"] == found["scored_bytes"] == found["tokens"] - 1
    assert found["bits_per_byte"] == pytest.approx(found["nats_per_token"] / 0.6931471805599453)
    assert found["fed_tokens"] > 3 * found["scored_tokens"]
    assert found["tokens_per_second"] > 0
    assert found["report"]["backend"] == "numpy"


def test_standard_input_is_a_text(run):
    figure = run()[1].split(" | ")[:2]
    assert run(file="-", stdin=TEXT.encode())[1].split(" | ")[:2] == figure


def test_a_finished_run_is_not_done_again(run, tmp_path):
    arguments = ("--window", "40", "--resume", str(tmp_path / "state"), "--json", "-")
    first, again = (json.loads(run(*arguments)[1]) for _ in range(2))
    assert again["report"]["prompt_tokens"] == 0
    assert again["nats_per_token"] == first["nats_per_token"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--window", "0"],
        ["--window", "9", "--stride", "10"],
        ["--window", "x"],
        ["--json", "/nowhere/at/all"],
    ],
)
def test_wrong_usage(run, arguments):
    assert run(*arguments)[0] == 2


def test_texts_that_cannot_be(run, tmp_path):
    (tmp_path / "bad").write_bytes(b"abc\xff")
    (tmp_path / "short").write_text("a")
    for file, said in (
        ("bad", "byte 0xFF at offset 3"),
        ("short", "at least 2"),
        ("missing", "cannot be read"),
    ):
        code, out, err = run(file=str(tmp_path / file))
        assert (code, out) == (2, "")
        assert said in err.splitlines()[-1]
