"""Progress of a prompt: silence for quick ones, a line that is erased, an honest estimate."""

import io

import numpy as np

import k3mlx
from k3mlx.cli.progress import PromptProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(out, seconds_a_layer, total=10):
    now = [100.0]
    progress = PromptProgress(out, lambda: now[0])
    for done in range(total):
        progress(done, total)
        now[0] += seconds_a_layer
    progress(total, total)
    return out.getvalue()


def test_a_quick_prompt_says_nothing():
    assert run(Terminal(), 0.19) == ""
    assert run(io.StringIO(), 0.19) == ""


def test_a_terminal_gets_one_line_that_goes_away():
    text = run(Terminal(), 1.0)
    lines = text.split("\r")
    assert lines[1] == "prompt: layer 2 of 10, 20%, 8 s left"
    assert [line.split()[2] for line in lines[1:9]] == [str(n) for n in range(2, 10)]
    assert lines[-1] == ""
    assert lines[-2].strip() == ""
    assert len(lines[-2]) >= len(lines[-3].rstrip())


def test_a_file_gets_a_line_now_and_then():
    text = run(io.StringIO(), 20.0)
    assert text.splitlines()[0] == "prompt: layer 1 of 10, 10%, 3 min 0 s left"
    assert len(text.splitlines()) == 5
    assert "\r" not in text


def test_an_engine_tells_each_layer_of_each_pass_of_a_prompt_only():
    told = []
    with k3mlx.load(backend="numpy", prefill_step_size=2) as engine:
        engine.on_layer = lambda done, total: told.append((done, total))
        layers = engine.config.num_hidden_layers
        session = engine.session()
        logits = session.feed([1, 2, 3])
        assert told == [(n, 2 * layers) for n in range(2 * layers + 1)]
        session.feed([4])
        assert len(told) == 2 * layers + 1
        engine.on_layer = None
        again = engine.session()
        np.testing.assert_array_equal(again.feed([1, 2, 3]), logits)
