"""`k3mlx generate` as a user meets it: output, exit codes, and every kind of bad input."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from k3mlx.cli import main
from k3mlx.cli.options import faint

RAW = ["generate", "--raw", "--temp", "0", "--max-tokens", "4"]


class Run:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(byte_model, capsys, monkeypatch):
    """Run the command in this process against the random model; `stdin` are the bytes piped in."""

    def call(*arguments, stdin=None, model=byte_model):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = main([*arguments, "--model", str(model)])
        except SystemExit as exit:  # argparse
            code = exit.code
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return call


def test_raw_text_on_stdout_and_the_report_on_stderr(run):
    result = run(*RAW, "-p", "abc")
    assert result.code == 0
    assert result.out.endswith("\n")
    assert len(result.out) > 1
    assert "numpy float32 on cpu" in result.err
    assert "experts (mxfp4)" in result.err
    for words in (
        "prompt 3 tokens",
        "generated 4 tokens",
        "attention",
        "expert loading",
        "read",
        "peak memory",
    ):
        assert words in result.err, words


def test_prompt_from_stdin(run):
    flag = run(*RAW, "-p", "grüße")
    for arguments in (["-p", "-"], []):
        assert run(*RAW, *arguments, stdin="grüße".encode()).out == flag.out


def test_json_on_stdout_is_the_only_output(run):
    result = run(*RAW, "-p", "abc", "--json", "-")
    found = json.loads(result.out)
    assert result.out.count("\n") == 1
    assert {"text", "ids", "prompt_ids", "report", "reasoning", "tool_calls", "finish_reason"} <= set(found)
    assert len(found["ids"]) == 4
    assert found["report"]["generated_tokens"] == 4


def test_json_to_a_file_beside_the_text(run, tmp_path):
    result = run(*RAW, "-p", "abc", "--json", str(tmp_path / "run.json"))
    found = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert result.out == found["text"] + "\n"


def test_verbose_prints_what_runs_where(run):
    err = run(*RAW, "-p", "abc", "--verbose").err
    assert "part" in err
    for part in ("kda", "mla", "router", "experts", "head"):
        assert f"\n{part} " in err, part


def test_chat_is_the_default_and_the_system_prompt_counts(run):
    short = json.loads(run("generate", "-m", "1", "-p", "hi", "--json", "-").out)
    system = json.loads(
        run("generate", "-m", "1", "-p", "hi", "--system-prompt", "Be brief.", "--json", "-").out
    )
    assert len(system["prompt_ids"]) - len(short["prompt_ids"]) > len("Be brief.")


def test_thinking_goes_to_stderr_and_can_be_hidden(run):
    shown = run("generate", "-m", "8", "--seed", "1", "-p", "hi")
    hidden = run("generate", "-m", "8", "--seed", "1", "-p", "hi", "--hide-thinking")
    reasoning = json.loads(run("generate", "-m", "8", "--seed", "1", "-p", "hi", "--json", "-").out)[
        "reasoning"
    ]
    assert reasoning
    assert reasoning in shown.err
    assert reasoning not in shown.out + hidden.out + hidden.err


def test_a_limit_inside_the_thinking_is_said(run):
    assert "before the answer began" in run("generate", "-m", "1", "-p", "hi").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", ""], "prompt is empty"),
        (["-p", "a", "--max-tokens", "0"], "--max-tokens is 0"),
        (["-p", "a", "--max-tokens", "-3"], "--max-tokens is -3"),
        (["-p", "a", "--max-tokens", "x"], "invalid int value"),
        (["-p", "a", "--temp", "-1"], "temp is -1"),
        (["-p", "a", "--top-p", "1.5"], "top_p is 1.5"),
        (["-p", "a", "--top-k", "-1"], "top_k is -1"),
        (["-p", "a", "--seed", "-1"], "seed is -1"),
        (["-p", "a", "--raw", "--effort", "low"], "--raw continues plain text"),
        (["-p", "a", "--effort", "extreme"], "invalid choice"),
        (["-p", "a" * 600, "--raw"], "600 tokens, expected at most 500"),
        (["-p", "a", "--backend", "torch"], "invalid choice"),
        (["-p", "a", "--expert-cache", "lots"], "expert_cache is 'lots'"),
        (["-p", "a", "--prefill-step-size", "0"], "prefill_step_size is 0"),
        (["-p", "a", "--unknown"], "unrecognized"),
        (["-p", "a\udc80"], "--prompt is not valid UTF-8"),
    ],
)
def test_bad_usage_exits_2_with_a_message(run, arguments, message):
    result = run("generate", *arguments)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_model_without_a_name(run):
    result = run(*RAW, "-p", "a", model="")
    assert result.code == 2
    assert "model is an empty name" in result.err


def test_empty_and_undecodable_stdin(run):
    assert "prompt is empty" in run(*RAW, stdin=b"").err
    result = run(*RAW, stdin=b"ab\xff")
    assert result.code == 2
    assert "not UTF-8: byte 0xFF at offset 2" in result.err


@pytest.mark.parametrize("option", ["--json", "--prompt-cache-file"])
def test_a_file_that_could_not_be_written_is_refused_before_the_work(run, tmp_path, option):
    for target in (tmp_path / "absent" / "x", tmp_path):
        result = run(*RAW, "-p", "a", option, str(target))
        assert result.code == 2
        assert f"{option} {target}: cannot be written" in result.err
        assert "layers" not in result.err  # nothing was loaded


def test_verbose_adds_the_traceback_and_keeps_the_exit_code(run, tmp_path):
    result = run(*RAW, "-p", "a", "--verbose", model=tmp_path / "absent")
    assert result.code == 3
    assert "Traceback" in result.err
    assert "k3mlx: error:" in result.err


def test_no_colour_where_it_is_not_wanted(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert faint(Terminal()) == ("\x1b[2m", "\x1b[22m")
    assert faint(io.StringIO()) == ("", "")
    monkeypatch.setenv("TERM", "dumb")
    assert faint(Terminal()) == ("", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert faint(Terminal()) == ("", "")


def cut_shard(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def bad_vocabulary(folder):
    path = folder / "tiktoken.model"
    path.write_bytes(path.read_bytes().replace(b" 7\n", b" x\n"))


def bad_field(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"situ"', '"gelu"'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "not found"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "empty"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "tiktoken.model").unlink(), "tiktoken.model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (cut_shard, "7 bytes are missing"),
        (bad_vocabulary, "line 8"),
        (bad_field, "hidden_act"),
    ],
)
def test_damaged_model_exits_3(run, byte_model, tmp_path, damage, message):
    folder = shutil.copytree(byte_model, tmp_path / "model")
    damage(folder)
    before = sorted(tmp_path.rglob("*"))
    result = run(*RAW, "-p", "a", model=folder)
    assert result.code == 3
    assert message in result.err
    assert "Traceback" not in result.err
    assert sorted(tmp_path.rglob("*")) == before


def test_names_of_another_vocabulary_are_set_aside_aloud(run, byte_model, tmp_path):
    folder = shutil.copytree(byte_model, tmp_path / "model")
    names = {"added_tokens_decoder": {"258": {"content": "<|im_end|>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    result = run(*RAW, "-p", "a", model=folder)
    assert result.code == 0
    assert "tokenizer_config.json" in result.err


def process(model, *arguments, **options):
    command = [sys.executable, "-m", "k3mlx", "generate", "--model", str(model), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", **options
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupt_during_decode_keeps_text_and_report(byte_model):
    with process(byte_model, "--raw", "--max-tokens", "480", "--temp", "0", "-p", "a") as child:
        first = child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130, err
    assert first + out.strip()
    assert "generated" in err
    assert "stopping" in err
    assert "Traceback" not in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupt_during_the_prompt(byte_model):
    with process(byte_model, "--raw", "--prefill-step-size", "1", "-m", "4", "-p", "a" * 480) as child:
        line = child.stderr.readline()  # printed when the model is loaded, before the prompt runs
        assert "numpy" in line
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130, err
    assert out == ""
    assert "generated 0 tokens" in err


@pytest.mark.skipif(os.name == "nt", reason="pipes are closed differently on Windows")
def test_closed_output_pipe_is_no_traceback(byte_model):
    with process(byte_model, "--raw", "--temp", "0", "-m", "400", "-p", "abc") as child:
        child.stdout.read(1)
        child.stdout.close()
        err = child.stderr.read()
    assert child.returncode == 1
    assert "the reader of our output has gone" in err
    assert "Traceback" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("redirection", "code", "answered"),
    [
        (">/dev/full", 1, False),
        (">&-", 0, False),
        ("2>&-", 0, True),
        ("2>/dev/full", 0, True),
        ("--json /dev/full", 1, True),
        ("--json - >/dev/full", 1, False),
    ],
)
def test_streams_that_are_closed_or_full(byte_model, redirection, code, answered):
    command = f'"{sys.executable}" -m k3mlx generate --raw -m 3 --temp 0 -p abc --model "{byte_model}" {redirection}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert bool(done.stdout) == answered


@pytest.mark.skipif(os.name == "nt", reason="closes a descriptor by the shell")
def test_closed_stdin_is_an_empty_prompt(byte_model):
    command = f'"{sys.executable}" -m k3mlx generate -p - --model "{byte_model}" <&-'
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"prompt is empty" in done.stderr


def test_help_is_quick_and_light():
    code = (
        "import sys, k3mlx.cli\n"
        "try: k3mlx.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'mlx', 'tiktoken', 'huggingface_hub', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)


def test_import_is_light():
    code = "import sys, k3mlx; assert not {'numpy', 'mlx', 'starlette'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.startswith("k3mlx 0.")
