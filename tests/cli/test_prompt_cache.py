"""`k3mlx generate --prompt-cache-file`: a prompt that begins like the last one is read from there on only."""

import json

import pytest

import k3mlx
from k3mlx.cli import main
from k3mlx.conversation import Conversation
from k3mlx.kept import KeptSessions


@pytest.fixture
def generate(byte_model, capsys):
    def run(prompt, *arguments):
        code = main(["generate", "--raw", "--temp", "0", "-m", "4", "--json", "-", "--model", str(byte_model),
                     "-p", prompt, *arguments])  # fmt: skip
        out = capsys.readouterr()
        return code, json.loads(out.out) if out.out else out.err

    return run


def test_what_was_read_is_not_read_again(generate, tmp_path):
    cache = ["--prompt-cache-file", str(tmp_path / "cache")]
    text = "a long beginning that many prompts share"
    _, first = generate(text, *cache)
    assert first["cached_tokens"] == 0
    _, again = generate(text + " and more", *cache)
    assert again["cached_tokens"] == len(text)
    assert again["report"]["prompt_tokens"] == len(" and more")
    _, plain = generate(text + " and more")
    assert again["ids"] == plain["ids"]
    _, longer = generate(text + " and more still", *cache)
    assert longer["cached_tokens"] == len(text + " and more")
    _, other = generate("something else", *cache)
    assert other["cached_tokens"] == 0


def test_a_conversation_is_not_overwritten(generate, byte_model, tmp_path):
    path = tmp_path / "cache"
    with k3mlx.load(byte_model) as engine:
        Conversation(engine, KeptSessions(engine, 0)).save(path)
    before = path.read_bytes()
    code, message = generate("text", "--prompt-cache-file", str(path))
    assert code == 2
    assert "holds a conversation" in message
    assert path.read_bytes() == before


def test_a_file_of_another_model_or_a_damaged_one(generate, tmp_path):
    path = tmp_path / "cache"
    generate("text", "--prompt-cache-file", str(path))
    path.write_bytes(path.read_bytes()[:-1])
    code, message = generate("text", "--prompt-cache-file", str(path))
    assert code == 3
    assert str(path) in message
