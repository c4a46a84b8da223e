"""`k3mlx chat` in a pseudo-terminal: every command, Ctrl-C, wide characters, long pastes; and without one."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

from k3mlx.checkpoint.safetensors import read_header
from k3mlx.cli.terminal import StatusLine

pty = pytest.importorskip("pty", reason="Windows has no pseudo-terminals")

# makes the terminal at file 0 the one whose Ctrl-C reaches us, then becomes the command
LAUNCH = """
import fcntl, os, struct, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
os.execv(sys.executable, [sys.executable, "-m", "k3mlx", "chat", *sys.argv[1:]])
"""
PROMPT = "> "


@pytest.fixture(scope="session")
def wide_model(byte_model, tmp_path_factory):
    """The random model with a context of 30000."""
    folder = tmp_path_factory.mktemp("wide") / "random"
    shutil.copytree(byte_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 30_000
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Terminal:
    """A chat in a terminal of 30 rows and 90 columns."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
        )
        os.close(slave)
        self.seen = ""
        self._from = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def type(self, text: str) -> None:
        data = text.encode()
        while data:  # a terminal takes some thousand bytes at once
            data = data[os.write(self.master, data[:1000]) :]

    def wait(self, pattern: str, seconds: float = 40) -> str:
        """Until the pattern appears after the last one; what was shown up to its end."""
        deadline = time.monotonic() + seconds
        while not (found := re.compile(pattern, re.DOTALL).search(self.seen, self._from)):
            assert time.monotonic() < deadline, f"{pattern!r} did not come; seen {self.seen[self._from :]!r}"
            assert self.process.poll() is None or found, f"ended; seen {self.seen[self._from :]!r}"
            time.sleep(0.01)
        start, self._from = self._from, found.end()
        return self.seen[start : self._from]

    def ready(self) -> str:
        """Until the next message can be typed."""
        return self.wait(r"\n(\x1b\[\?2004h)?> ")

    def command(self, text: str) -> str:
        self.type(text + "\r")
        return self.ready()

    def close(self) -> int:
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            os.close(self.master)

    def _read(self) -> None:
        import codecs

        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the other end is gone
                return
            self.seen += decoder.decode(data)


@pytest.fixture
def terminal(wide_model, tmp_path):
    """A function that starts a chat."""
    started = []

    def start(*arguments, ready=True):
        history = ["--history", str(tmp_path / "history")]
        defaults = ["--model", str(wide_model), "--seed", "3", "--temp", "0.7", "--max-tokens", "5"]
        one = Terminal(*defaults, *history, *arguments)
        started.append(one)
        if ready:
            one.ready()
        return one

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.close()


def saved(terminal: Terminal, path) -> dict:
    """What /save writes."""
    terminal.command(f"/save {path}")
    return json.loads(read_header(path).metadata["k3mlx.note.conversation"])


def test_every_command(terminal, tmp_path):
    chat = terminal()
    for name in ("/help", "/system", "/undo", "/reset", "/save", "/load", "/stats", "/exit"):
        assert name in chat.command("/help") or name == "/help"
    assert "there is no system prompt" in chat.command("/system")
    chat.command("/system Be kind.")
    assert "Be kind." in chat.command("/system")
    assert "wrote 5" in chat.command("hello")
    assert saved(chat, tmp_path / "one")["messages"][0]["content"] == "hello"
    assert saved(chat, tmp_path / "one")["system"] == "Be kind."
    assert re.search(
        r"read \d+ tokens .*wrote 5 .*kept: \d+ points.*peak memory", chat.command("/stats"), re.DOTALL
    )
    assert "taken back" in chat.command("/undo")
    assert "nothing to take back" in chat.command("/undo")
    assert "2 messages from" in chat.command(f"/load {tmp_path / 'one'}")
    assert "a new conversation" in chat.command("/reset")
    assert "nothing to take back" in chat.command("/undo")
    chat.command("/system -")
    assert "there is no system prompt" in chat.command("/system")
    assert "/nonsense is no command" in chat.command("/nonsense")
    assert "error:" in chat.command(f"/load {tmp_path / 'absent'}")
    assert "error:" in chat.command(f"/save {tmp_path / 'absent' / 'x'}")
    assert "needs the name of a file" in chat.command("/save")
    assert "needs the name of a file" in chat.command("/load")
    chat.type("/exit\r")
    assert chat.close() == 0


def test_thinking_is_dimmed_and_the_live_line_comes_and_goes(terminal):
    chat = terminal("--max-tokens", "300", "--temp", "0")
    shown = chat.command("hello")
    assert "\x1b[1;29r" in shown  # text scrolls above the last row
    assert re.search(r"\x1b\[30;1H\x1b\[2K\x1b\[2mreading \d+ of \d+ tokens", shown)
    assert re.search(r"\x1b\[2m\d+ tokens \([\d.e+]+/s\), \d+ % of experts found in memory\x1b\[22m", shown)
    assert shown.rindex("\x1b[r\x1b[30;1H") > shown.rindex("\x1b[1;29r")
    assert re.search(r"\x1b\[2m[^\x1b]+\x1b\[22m\x1b\[2m", shown)  # pieces of thinking
    chat.type("\x04")
    assert chat.close() == 0


def test_an_answer_is_stopped_and_the_conversation_goes_on(terminal, tmp_path):
    chat = terminal("--max-tokens", "20000", "--temp", "1.5")
    chat.type("hello\r")
    chat.wait(r"\d+ tokens \([\d.e+]+/s\)")
    chat.type("\x03")
    assert "stopped; read" in chat.ready()
    first = saved(chat, tmp_path / "one")["messages"]
    assert [m["role"] for m in first] == ["user", "assistant"]
    chat.type("more\r")
    chat.wait(r"reading (\d+) of")
    chat.type("\x03")
    chat.type("\x03")
    chat.ready()
    second = saved(chat, tmp_path / "one")["messages"]
    assert second[:2] == first
    chat.type("\x03")
    chat.wait("once more, or /exit, to leave")
    chat.type("\x03")
    assert chat.close() == 130


def test_stopping_while_the_prompt_is_read_keeps_nothing(terminal, tmp_path):
    chat = terminal("--prefill-step-size", "1")
    chat.type("\x1b[200~" + "x" * 9000 + "\x1b[201~\r")
    chat.wait("reading 20 of")
    chat.type("\x03")
    assert "the message is not kept" in chat.ready()
    assert saved(chat, tmp_path / "one")["messages"] == []
    assert "wrote 5" in chat.command("hi")


def test_wide_characters_long_pastes_and_lines(terminal, tmp_path):
    chat = terminal("--max-tokens", "2")
    wide = "日本語 🚀 grüße 👩‍👩‍👧 ｗｉｄｅ"
    chat.command(wide)
    chat.command("zz\x7f\x7f語\x7fok")  # backspace takes a whole character
    paste = "".join(f"line {n} of a long paste, 語\n" for n in range(400))[:10_000].strip()
    assert len(paste) > 9_900
    chat.type("\x1b[200~" + paste.replace("\n", "\r") + "\x1b[201~")
    time.sleep(0.5)
    chat.command("")
    chat.type("one \\\r")
    chat.wait("… ")
    chat.command("two")
    chat.type('"""first\r')
    chat.wait("… ")
    chat.type("\r")
    chat.wait("… ")
    chat.command('last"""')
    asked = [m["content"] for m in saved(chat, tmp_path / "one")["messages"] if m["role"] == "user"]
    assert asked == [wide, "ok", paste, "one \ntwo", "first\n\nlast"]


def test_history_lasts(terminal, tmp_path):
    chat = terminal("--max-tokens", "1")
    chat.command("the first question")
    chat.type("/exit\r")
    chat.close()
    assert (tmp_path / "history").stat().st_mode & 0o077 == 0
    chat = terminal("--max-tokens", "1")
    chat.type("\x1b[A\x1b[A")
    chat.command("")
    assert saved(chat, tmp_path / "one")["messages"][0]["content"] == "the first question"


def test_a_conversation_goes_on_in_the_next_chat(terminal, tmp_path):
    file = ["--prompt-cache-file", str(tmp_path / "kept")]
    chat = terminal(*file)
    chat.command("hello")
    chat.type("/exit\r")
    assert chat.close() == 0
    chat = terminal(*file, ready=False)
    assert "2 messages from" in chat.ready()
    read, total = map(int, re.search(r"read (\d+) of (\d+) tokens", chat.command("more")).groups())
    border = '<|open|>message role="user"<|sep|>hello<|close|>message<|sep|><|end_of_msg|>'
    control = re.findall(r"<\|\w+\|>", border)
    # what a random model says is read back as other ids, so the border before its answer is the last common
    assert total - read == len(border) - sum(map(len, control)) + len(control)


def test_too_long_a_message_is_refused_and_the_chat_goes_on(terminal):
    chat = terminal()
    chat.type("\x1b[200~" + "x" * 31_000 + "\x1b[201~\r")
    assert "expected at most 30000" in chat.ready()
    assert "wrote 5" in chat.command("hi")


def test_lines_from_a_pipe(wide_model):
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "k3mlx",
            "chat",
            "--model",
            str(wide_model),
            "--max-tokens",
            "3",
            "--seed",
            "1",
        ],
        input="hello\n/stats\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert "> " not in result.stdout
    assert "wrote 3" in result.stdout


def test_the_live_line_leaves_a_cursor_behind_the_last_column_alone(monkeypatch, capsys):
    line = StatusLine()
    monkeypatch.setattr(line, "_rows", 30)
    monkeypatch.setattr(line, "_columns", 10)

    def shows_after(text):
        capsys.readouterr()
        line.written(text)
        line.show("status")
        return "status" in capsys.readouterr().out

    assert shows_after("123456789")
    assert not shows_after("0")  # the tenth of ten columns is filled, the next character wraps
    assert shows_after("x")
    assert shows_after("\n" + "語" * 4)
    assert not shows_after("語")
    assert shows_after("語e\u0301")
    assert not shows_after("\n語語語語9語語語語語")  # a wide one does not fit into one column
