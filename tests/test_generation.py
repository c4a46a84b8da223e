"""The decode loop: stop ids, limits, channels, seeds, and the report of one run."""

import json
import shutil
from collections.abc import Sequence

import numpy as np
import pytest

import k3mlx
from k3mlx.errors import ModelFilesError, UsageError
from k3mlx.generation import complete, sampling_defaults, stream_generate
from tests.text import BYTES

OPEN, CLOSE, SEP, END = (f"<|{name}|>" for name in ("open", "close", "sep", "end_of_msg"))


class Scripted:
    """Stands in for a backend: whatever it is fed, the logits point at the next id of a script."""

    def __init__(self, engine, script: str) -> None:
        self.inner = engine.backend
        self.script = engine.tokenizer.encode(script, allow_special=True)
        self.fed: list[list[int]] = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def forward(self, ids: Sequence[int], state, all_logits, hooks):
        for layer in range(self.config.num_hidden_layers):
            hooks.before_layer(layer)
        self.fed.append(list(ids))
        logits = np.zeros(self.config.vocab_size, np.float32)
        logits[self.script[len(self.fed) - 1]] = 9
        return logits, state


@pytest.fixture
def scripted(engine, monkeypatch):
    def install(script):
        monkeypatch.setattr(engine, "backend", Scripted(engine, script))
        return engine

    return install


ANSWER = f"Hm.{CLOSE}think{SEP}{OPEN}response{SEP}Grüße 🚀{CLOSE}response{SEP}{CLOSE}message{SEP}{END}"


def test_channels_and_end(scripted):
    engine = scripted(ANSWER)
    done = complete(engine, "hi", temp=0)
    assert (done.reasoning, done.text, done.finish_reason) == ("Hm.", "Grüße 🚀", "stop")
    assert done.ids == engine.backend.script
    assert engine.backend.fed[0] == done.prompt_ids
    assert engine.backend.fed[1:] == [[id] for id in done.ids[:-1]]  # the stop id is not fed
    assert (
        k3mlx.generate(scripted(ANSWER), messages=[{"role": "user", "content": "hi"}], temp=0) == "Grüße 🚀"
    )


def test_pieces_join_to_the_completion_and_never_split_a_character(scripted):
    pieces = list(stream_generate(scripted(ANSWER), "hi", temp=0))
    *shown, last = pieces
    assert "".join(piece.text for piece in shown if piece.channel == "think") == "Hm."
    assert "".join(piece.text for piece in shown if piece.channel == "response") == "Grüße 🚀"
    assert [id for piece in pieces for id in piece.ids] == last.completion.ids
    assert "\ufffd" not in "".join(piece.text for piece in pieces)
    assert last.report["generated_tokens"] == len(last.completion.ids)
    assert all(piece.completion is None and piece.text for piece in shown)


def test_tool_call(scripted):
    call = (
        f'{CLOSE}response{SEP}{OPEN}tools{SEP}{OPEN}call tool="f" index="1"{SEP}{OPEN}argument key="n"'
        f' type="number"{SEP}2{CLOSE}argument{SEP}{CLOSE}call{SEP}{CLOSE}tools{SEP}{CLOSE}message{SEP}{END}'
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    done = complete(scripted(call), "go", tools=[tool], thinking=False, temp=0)
    assert done.tool_calls == [{"name": "f", "arguments": '{"n": 2}'}]
    assert done.finish_reason == "stop"


def test_an_ordinary_id_named_as_end_stops_and_is_not_text(byte_model, tmp_path):
    folder = shutil.copytree(byte_model, tmp_path / "model")
    end = BYTES.index(b"!")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "temperature": 0}))
    with k3mlx.load(folder) as engine:
        engine.backend = Scripted(engine, f"{CLOSE}think{SEP}{OPEN}response{SEP}ab!cd")
        done = complete(engine, "hi")
    assert (done.text, done.finish_reason) == ("ab", "stop")


def test_limit(scripted):
    done = complete(scripted(ANSWER), "hi", temp=0, max_tokens=2)
    assert (done.reasoning, done.text, done.finish_reason, len(done.ids)) == ("Hm", "", "length", 2)


def test_character_cut_by_the_limit_becomes_one_replacement(scripted):
    done = complete(scripted("é"), "hi", raw=True, temp=0, max_tokens=1)
    assert done.text == "\ufffd"


def test_raw_text_stops_on_the_stop_ids_and_shows_no_marker(scripted):
    done = complete(scripted(f"ab{END}"), "hi", raw=True, temp=0)
    assert (done.text, done.finish_reason) == ("ab", "stop")
    assert len(done.prompt_ids) == 2  # no bos, no wrapper


def test_context_ends_a_run(scripted):
    done = complete(scripted("x" * 600), "p" * 490, raw=True, temp=0, max_tokens=600)
    assert (len(done.prompt_ids), len(done.ids), done.finish_reason) == (490, 11, "length")


def test_prompt_beyond_the_context(engine):
    with pytest.raises(UsageError, match="501 tokens, expected at most 500"):
        complete(engine, "p" * 501, raw=True)


def test_cancelling_keeps_the_text(scripted):
    engine = scripted("abcdef")
    asked = iter(range(1000))
    done = complete(
        engine, "hi", raw=True, temp=0, should_stop=lambda: next(asked) >= 14
    )  # in the fourth pass
    assert (done.text, done.finish_reason) == ("abc", "cancelled")
    assert done.report["generated_tokens"] == 3


def test_report_is_of_one_run(engine):
    first = complete(engine, "hello", raw=True, max_tokens=3, seed=1).report
    second = complete(engine, "hi", raw=True, max_tokens=5, seed=1).report
    assert (first["prompt_tokens"], first["generated_tokens"], first["decode_steps"]) == (5, 3, 2)
    assert (second["prompt_tokens"], second["generated_tokens"], second["decode_steps"]) == (2, 5, 4)
    calls = {part["part"]: part["calls"] for part in second["parts"]}
    assert calls["head"] == 5
    assert second["experts"]["policy"] == engine.report()["experts"]["policy"]


def test_seed_repeats_on_the_real_model(engine):
    one, two, other = (complete(engine, "abc", raw=True, max_tokens=12, seed=s).ids for s in (0, 0, 1))
    assert one == two
    assert one != other


def test_a_session_is_continued(engine):
    session = engine.session()
    first = complete(engine, "abc", raw=True, max_tokens=4, temp=0, session=session)
    assert session.ids == first.prompt_ids + first.ids[:-1]
    complete(engine, "d", raw=True, max_tokens=1, temp=0, session=session)
    assert session.ids == first.prompt_ids + first.ids[:-1] + [engine.tokenizer.encode("d")[0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({}, "either a prompt or messages"),
        ({"prompt": "a", "messages": []}, "either a prompt or messages"),
        ({"messages": [{"role": "user", "content": "a"}], "raw": True}, "raw continues plain text"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "max_tokens": -5}, "max_tokens is -5"),
        ({"prompt": "a", "top_p": 2}, "top_p is 2"),
        ({"prompt": "a", "effort": "huge"}, "huge"),
        ({"prompt": "a\ud800"}, "surrogate"),
    ],
)
def test_input_that_cannot_be_used(engine, arguments, message):
    with pytest.raises(UsageError, match=message):
        stream_generate(engine, **arguments)
    assert engine.report()["prompt_tokens"] == 0


def test_sampling_defaults_come_from_the_snapshot(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(
        json.dumps({"temperature": 0, "top_p": 0.5, "top_k": 7, "eos_token_id": 1, "min_p": None})
    )
    assert sampling_defaults(tmp_path) == {"temp": 0, "top_p": 0.5, "top_k": 7}
    for bad in ('{"temperature": "hot"}', '{"top_k": 1.5}', "[]", "{"):
        path.write_text(bad)
        with pytest.raises(ModelFilesError, match="generation_config"):
            sampling_defaults(tmp_path)
