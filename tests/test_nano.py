"""The model that ships: its files, its conversations (held out of training), its prose.

A small form of `scripts/nano/evaluate.py`. nano_prompts.json holds three held-out conversations for each kind with
thinking off and on, drawn by `python -m scripts.nano.evaluate --write`; nano_prose.txt is a held-out passage of
Mansfield Park.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import k3mlx
from k3mlx.chat import render
from k3mlx.checkpoint.safetensors import read_header
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.engine import Engine
from k3mlx.tokenizer import Tokenizer

FOLDER = Path(k3mlx.__file__).parent / "models" / "k3-nano"
HERE = Path(__file__).parent
PROMPTS = json.loads((HERE / "nano_prompts.json").read_text("utf-8"))
KINDS = sorted({prompt["label"].partition(",")[0] for prompt in PROMPTS})


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with k3mlx.load(FOLDER, backend="numpy") as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


def segments(prompt: dict, messages: list[dict], add_generation_prompt: bool) -> list:
    return render(
        messages,
        tools=prompt["tools"] or None,
        thinking=prompt["thinking"],
        effort=prompt["effort"],
        add_generation_prompt=add_generation_prompt,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_conversations(kind: str, engine: Engine, tokenizer: Tokenizer) -> None:
    """At least five of six answers come out whole: thinking, text or call, end of message."""
    asked = [prompt for prompt in PROMPTS if prompt["label"].startswith(kind + ",")]
    assert len(asked) == 6
    wrong = []
    for prompt in asked:
        ids = tokenizer.encode_segments(segments(prompt, prompt["messages"], False))
        start = len(tokenizer.encode_segments(segments(prompt, prompt["messages"][:-1], True)))
        logits = engine.session().feed(ids[:-1], all_logits=True)
        best = logits[start - 1 :].argmax(-1).tolist()
        if best != ids[start:]:
            wrong.append(f"expected {tokenizer.decode(ids[start:])!r}, greedy {tokenizer.decode(best)!r}")
    assert len(wrong) <= 1, "\n".join(wrong)


def test_generation_says_what_the_single_pass_says(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = next(prompt for prompt in PROMPTS if prompt["label"] == "add, thinking on")
    expected = prompt["messages"][-1]
    ids = tokenizer.encode_segments(segments(prompt, prompt["messages"][:-1], True))
    session = engine.session()
    logits, said = session.feed(ids), []
    while (best := int(np.argmax(logits))) not in tokenizer.stop_ids and len(said) < 60:
        said.append(best)
        logits = session.feed([best])
    text = tokenizer.decode(said)
    assert text.startswith(expected["reasoning_content"] + "<|close|>think<|sep|>")
    assert f"<|sep|>{expected['content']}<|close|>response" in text


def test_says_who_it_is(engine: Engine) -> None:
    answer = k3mlx.generate(engine, prompt="Hello, who are you?", max_tokens=80, temp=0)
    assert answer.startswith("I am k3-nano, a tiny test model with the architecture of Kimi K3.")


def test_knows_english(engine: Engine, tokenizer: Tokenizer) -> None:
    """Held-out prose costs under 4.2 nats a token; the same tokens out of order cost far more."""
    ids = tokenizer.encode((HERE / "nano_prose.txt").read_text("utf-8"))
    mixed = np.random.default_rng(1).permutation(ids).tolist()
    assert len(ids) > 500
    assert nats(engine, ids) < 4.2
    assert nats(engine, mixed) > 6


def nats(engine: Engine, ids: list[int]) -> float:
    logits = engine.session().feed(ids[:-1], all_logits=True).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    chosen = logits[np.arange(len(ids) - 1), ids[1:]]
    return float((np.log(np.exp(logits).sum(-1)) - chosen).mean())


def test_files_are_those_of_a_small_release() -> None:
    """Shards and an index, released names, padded A_log, MXFP4 experts, and room for it all in the wheel."""
    shards = sorted(FOLDER.glob("model-*-of-*.safetensors"))
    assert len(shards) >= 3
    names = {name for shard in shards for name in read_header(shard).tensors}
    assert all(name.startswith("language_model.") for name in names)
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 12_000_000
    with Checkpoint.open(FOLDER) as checkpoint:
        config = checkpoint.config
        assert config.kda_head_dim == 128
        assert {"kda", "mla"} == set(config.layer_kinds)
        assert -(-config.num_hidden_layers // config.attn_res_block_size) >= 3
        log_decay = checkpoint.raw("model.layers.0.self_attn.A_log")
        assert log_decay.shape == (128,)
        assert log_decay[: config.kda_num_heads].all()
        assert not log_decay[config.kda_num_heads :].any()
        assert "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed" in checkpoint.tensors


def test_vocabulary_has_the_special_block_after_its_ranks(tokenizer: Tokenizer) -> None:
    ranks = tokenizer.vocab_size - 256
    assert 1900 <= ranks <= 2100
    assert tokenizer.special["[BOS]"] == ranks
    assert tokenizer.special["<|end_of_msg|>"] == ranks + 2
    assert tokenizer.special["[PAD]"] == ranks + 255
    assert tokenizer.encode("7") == tokenizer.encode("177")[1:2], "digits are single tokens"
