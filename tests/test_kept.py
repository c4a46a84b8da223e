"""Kept sessions: what is read again, what is given up, and that nothing changes an answer."""

import json
import subprocess
import sys

import numpy as np
import pytest

import k3mlx
from k3mlx import machine
from k3mlx.conversation import Conversation
from k3mlx.errors import ModelFilesError, ResourceError, UsageError
from k3mlx.generation import RunOptions, chat_prompt, complete, run_prompt
from k3mlx.kept import KeptSessions, Prompt, session_memory
from k3mlx.sampling import SamplingOptions
from tests.text import marked
from tests.tiny import random_config, write_random_model

GREEDY = RunOptions(SamplingOptions(temp=0), max_tokens=80)
END = marked(")response·)message·¶")


class Letters:
    """A constraint under which any model answers with five small letters: ids that text encodes to again."""

    def __init__(self, tokenizer) -> None:
        self.letters = [tokenizer.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]
        self.end = tokenizer.encode(END, allow_special=True)
        self.drawn = 0

    def mask(self, logits):
        allowed = self.letters if self.drawn < 5 else [self.end[self.drawn - 5]]
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked

    def accept(self, id):
        self.drawn += 1


def answer(engine, messages, kept=None):
    """(completion, prompt ids that were read for it)."""
    before = engine.report()["prompt_tokens"]
    prompt = chat_prompt(engine.tokenizer, messages, thinking=False)
    *_, last = run_prompt(engine, prompt, GREEDY, kept=kept, constraint=Letters(engine.tokenizer))
    return last.completion, engine.report()["prompt_tokens"] - before


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def border(engine, messages) -> int:
    """Ids up to the end of these messages."""
    return len(chat_prompt(engine.tokenizer, messages, thinking=False, add_generation_prompt=False).ids)


def test_a_second_turn_reads_only_what_is_new(engine):
    kept = KeptSessions(engine, 1 << 30)
    messages = [{"role": "system", "content": "s"}, user("one")]
    first, read = answer(engine, messages, kept)
    assert (first.finish_reason, len(first.text), first.cached_tokens) == ("stop", 5, 0)
    assert read == len(first.prompt_ids)
    messages += [assistant(first.text), user("two")]
    second, read = answer(engine, messages, kept)
    known = len(first.prompt_ids) + len(first.ids) - 1  # the id that ends a turn is drawn, not fed
    assert second.cached_tokens == known
    assert read == len(second.prompt_ids) - known
    scratch, _ = answer(engine, messages)
    assert second.ids == scratch.ids
    assert second.prompt_ids == scratch.prompt_ids


def test_an_edit_falls_back_to_the_last_common_border(engine):
    kept = KeptSessions(engine, 1 << 30)
    messages = [{"role": "system", "content": "s"}]
    for text in ("one", "two", "three"):
        messages.append(user(text))
        messages.append(assistant(answer(engine, messages, kept)[0].text))
    for edited, common in (
        ([*messages[:5], user("THREE")], 5),  # the last question
        ([*messages[:3], user("TWO")], 3),
        ([messages[0], user("ONE")], 1),
        ([*messages[:4], assistant("other"), user("x")], 4),  # an answer
        ([{"role": "system", "content": "t"}, *messages[1:3], user("x")], 0),
    ):
        done, read = answer(engine, edited, kept)
        least = border(engine, messages[:common]) if common else 0
        least -= common in (3, 5)  # the end of an answer is read along with what follows it
        assert done.cached_tokens == least, edited
        assert read == len(done.prompt_ids) - least
        assert done.ids == answer(engine, edited)[0].ids


def test_the_same_question_again_reads_only_the_opener(engine):
    kept = KeptSessions(engine, 1 << 30)
    first, _ = answer(engine, [user("one")], kept)
    again, read = answer(engine, [user("one")], kept)
    assert again.ids == first.ids
    assert read == len(first.prompt_ids) - border(engine, [user("one")])


def test_a_cancelled_prompt_is_not_lost(engine):
    kept = KeptSessions(engine, 1 << 30)
    engine.prefill_step_size = 10
    asked = iter(range(10_000))
    done = complete(engine, "x" * 100, raw=True, kept=kept, should_stop=lambda: next(asked) >= 26)
    assert done.finish_reason == "cancelled"
    done = complete(engine, "x" * 100, raw=True, kept=kept, max_tokens=1)
    assert done.cached_tokens == 60  # six of ten passes, four layers each


@pytest.mark.parametrize("disk", [0, 1 << 30])
def test_a_resumed_session_is_the_session(engine, disk):
    ids = engine.tokenizer.encode("a text that is read in two parts, or in one")
    whole = engine.session()
    whole.feed(ids[:20])
    expected = whole.feed(ids[20:])
    kept = KeptSessions(engine, 0 if disk else 1 << 30, disk)
    part = engine.session()
    part.feed(ids[:20])
    kept.keep(part)
    assert (kept.used[0] > 0, kept.used[1] > 0) == (not disk, bool(disk))
    found = kept.resume(ids)
    assert found.ids == ids[:20]
    assert np.array_equal(found.feed(ids[20:]), expected)
    assert len(kept.resume(ids[:20])) == 0  # something must be left to read
    kept.close()
    assert len(kept.resume(ids)) == 0


def session_of(engine, ids):
    session = engine.session()
    session.feed(ids)
    return session


def test_the_least_recently_used_goes_first(engine):
    size = session_of(engine, [1]).snapshot().state.nbytes
    kept = KeptSessions(engine, int(size * 2.5))
    for id in (1, 2):
        kept.keep(session_of(engine, [id]))
    assert len(kept.resume([1, 9])) == 1
    kept.keep(session_of(engine, [3]))
    assert [len(kept.resume([id, 9])) for id in (1, 2, 3)] == [1, 0, 1]
    kept.keep(kept.resume([1, 9]))
    assert len(kept) == 2
    assert kept.used[0] <= size * 2.5


def test_disk_behind_memory(engine):
    size = session_of(engine, [1]).snapshot().state.nbytes
    kept = KeptSessions(engine, int(size * 1.5), size * 2)
    for id in (1, 2, 3, 4):
        kept.keep(session_of(engine, [id]))
    folder = kept._folder
    files = sorted(folder.iterdir())
    assert folder.stat().st_mode & 0o077 == 0
    assert kept.used[0] <= size * 1.5
    assert kept.used[1] <= size * 2
    held = [len(kept.resume([id, 9])) for id in (1, 2, 3, 4)]
    assert held[3] == 1
    assert sum(held) == len(kept) == len(files) + 1
    for file in files:
        file.write_bytes(file.read_bytes()[:-7])  # damaged behind our back
    assert [len(kept.resume([id, 9])) for id in (1, 2, 3, 4)] == [0, 0, 0, 1]
    kept.close()
    assert not folder.exists()


def test_what_snapshots_share_counts_once(engine):
    kept = KeptSessions(engine, 1 << 30)
    session = session_of(engine, [1])
    kept.keep(session)
    one = kept.used[0]
    session.feed([2])
    kept.keep(session)
    state = session.snapshot().state
    own = sum(
        bytes
        for key, bytes in state.memory().items()
        if key not in kept.resume([1, 9]).snapshot().state.memory()
    )
    assert own < state.nbytes  # the latents lie in one buffer
    assert kept.used[0] == one + own


def test_where_reading_pauses():
    borders = (10, 20, 30, 40, 900, 910, 920, 930)
    prompt = Prompt(tuple(range(940)), "think", borders, shared=2)
    assert prompt.pauses(512) == [20, 900, 920, 930]
    assert prompt.pauses(10) == list(borders)
    assert prompt.pauses(512, known=19) == [900, 920, 930]
    assert prompt.pauses(10, known=895) == [910, 920, 930]
    assert prompt.pauses(512, known=935) == []
    assert Prompt((1, 2)).pauses(512) == []
    assert Prompt(tuple(range(12)), "think", (10,), shared=0).pauses(512) == [10]


def test_borders_of_a_prompt(engine):
    messages = [
        {"role": "system", "content": "s"},
        user('<|end_of_msg|> role="user"'),
        assistant("b"),
        user("c"),
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    prompt = chat_prompt(engine.tokenizer, messages, tools=[tool])
    ends = [engine.tokenizer.marker(prompt.ids[end - 1]) for end in prompt.borders]
    assert ends == ["<|end_of_msg|>"] * 5
    assert prompt.shared == 2  # the tools and the system message
    assert engine.tokenizer.decode(prompt.ids[-prompt.opener :]) == "<|open|>think<|sep|>"
    plain = chat_prompt(engine.tokenizer, messages[1:], add_generation_prompt=False)
    assert (plain.shared, plain.opener) == (0, 0)


CONTINUE = """
import json, sys, k3mlx
with k3mlx.load(sys.argv[1]) as engine:
    session = engine.load_session(sys.argv[2])
    print(json.dumps([session.notes, k3mlx.complete(
        engine, "and then", raw=True, temp=0, max_tokens=9, session=session).ids]))
"""


def test_another_process_goes_on_with_the_same_tokens(engine, byte_model, tmp_path):
    session = session_of(engine, engine.tokenizer.encode("once upon a time"))
    session.notes = {"hint": "grüße"}
    session.save(tmp_path / "kept")
    unbroken = complete(engine, "and then", raw=True, temp=0, max_tokens=9, session=session)
    command = [sys.executable, "-c", CONTINUE, str(byte_model), str(tmp_path / "kept")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [{"hint": "grüße"}, unbroken.ids]


def test_files_of_other_models_and_damaged_ones_are_refused(engine, byte_model, tmp_path):
    path = tmp_path / "kept"
    session_of(engine, [1, 2, 3]).save(path)
    # the same config, other weights
    rng = np.random.default_rng(20)
    config = random_config(rng, vocab_size=512, num_hidden_layers=4, max_position_embeddings=500)
    assert config == json.loads((byte_model / "config.json").read_text())
    other = write_random_model(tmp_path / "other", config, np.random.default_rng(99))
    with k3mlx.load(other) as stranger, pytest.raises(UsageError, match="another model"):
        stranger.load_session(path)
    with k3mlx.load(byte_model, dtype="float64") as wider, pytest.raises(UsageError, match="another model"):
        wider.load_session(path)
    data = path.read_bytes()
    for cut in (0, 5, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(ModelFilesError):
            engine.load_session(path)
    path.write_bytes(data)
    assert engine.load_session(path).ids == [1, 2, 3]


def test_a_save_that_fails_leaves_the_old_file(engine, tmp_path, monkeypatch):
    path = tmp_path / "kept"
    session = session_of(engine, [1, 2])
    session.save(path)
    monkeypatch.setattr(engine.backend, "export_state", lambda state: {"x": "not an array"})
    session.feed([3])
    with pytest.raises((TypeError, ValueError, AttributeError)):
        session.save(path)
    monkeypatch.undo()
    assert engine.load_session(path).ids == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def conversation(engine):
    return Conversation(engine, KeptSessions(engine, 1 << 30), system="s", thinking=False)


def test_a_conversation_is_asked_undone_saved_and_loaded(conversation, tmp_path):
    options = RunOptions(SamplingOptions(temp=1, seed=1), max_tokens=4)
    list(conversation.ask("one", options))
    list(conversation.ask("two", options))
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2
    conversation.save(tmp_path / "kept")
    messages = list(conversation.messages)
    assert conversation.undo()
    assert conversation.messages == messages[:2]
    conversation.reset()
    assert not conversation.undo()
    other = Conversation(conversation.engine, KeptSessions(conversation.engine, 1 << 30))
    other.load(tmp_path / "kept")
    assert (other.messages, other.system) == (messages, "s")
    assert len(other.kept) == 1


def test_what_cannot_be_asked_leaves_a_conversation_as_it_was(conversation):
    with pytest.raises(UsageError):
        list(conversation.ask("\ud800", GREEDY))
    with pytest.raises(UsageError, match="the context"):
        list(conversation.ask("x" * 600, GREEDY))
    assert list(conversation.ask("x", GREEDY, should_stop=lambda: True))[-1].completion.ids == []
    assert conversation.messages == []


def test_a_file_whose_messages_are_damaged(conversation, tmp_path):
    session = conversation.engine.session()
    for note in ("{", "[]", '{"system": null}', '{"system": null, "messages": 5}'):
        session.notes = {"conversation": note}
        session.save(tmp_path / "kept")
        with pytest.raises(ModelFilesError, match="messages are damaged"):
            conversation.load(tmp_path / "kept")
    session.notes = {"conversation": '{"system": null, "messages": [{"role": "x"}]}'}
    session.save(tmp_path / "kept")
    with pytest.raises(UsageError):
        conversation.load(tmp_path / "kept")
    assert conversation.messages == []


def test_how_much_memory_sessions_get(monkeypatch):
    assert session_memory("3GB") == 3_000_000_000
    assert session_memory("auto", "64GB") == 4_000_000_000
    assert session_memory("auto", "16GB") == 1_000_000_000
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert session_memory("auto") == 4_000_000_000


def test_their_memory_is_part_of_the_plan(byte_model):
    budget = (machine.footprint() or 0) + 400_000_000  # this process may have grown before this test

    def cache(**options):
        with k3mlx.load(byte_model, memory=budget, **options) as engine:
            return engine.report()["memory"]

    plain, with_sessions = cache(), cache(session_memory="20MB")
    assert with_sessions["state"] - plain["state"] == 20_000_000
    with pytest.raises(ResourceError, match="too small"):
        cache(session_memory="1GB")
