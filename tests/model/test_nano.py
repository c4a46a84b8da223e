"""The small K3 of the package says on MLX, in either dtype, what it says on numpy."""

import pytest

import k3mlx
from k3mlx.checkpoint.hub import resolve
from k3mlx.errors import K3Error
from tests.model.conversations import greedy_answers

PROMPTS = ["Hello", "What is 3 + 4?", "Who are you?", "Repeat: violet", "What can you do?"]


def answers(**options):
    with k3mlx.load(device="cpu", **options) as engine:
        done = [k3mlx.complete(engine, prompt=prompt, max_tokens=60, temp=0) for prompt in PROMPTS]
    return [(one.text, one.reasoning, one.ids) for one in done]


@pytest.fixture(scope="module")
def expected():
    try:
        resolve(None)
    except K3Error as error:
        pytest.skip(f"the model of the package is not there: {error}")
    return answers(backend="numpy", dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_is_that_of_numpy(expected, dtype):
    assert answers(backend="mlx", dtype=dtype) == expected
    assert all(text for text, _, _ in expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_held_out_conversation_is_that_of_numpy(expected, dtype):
    with k3mlx.load(backend="numpy", dtype="float32") as engine:
        of_numpy = greedy_answers(engine)
    with k3mlx.load(backend="mlx", device="cpu", dtype=dtype) as engine:
        assert greedy_answers(engine) == of_numpy
    assert len(of_numpy) >= 36
