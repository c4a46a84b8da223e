"""The whole reference model: the specification's five-layer example, and any split of a sequence."""

import numpy as np
import pytest

import k3mlx
from k3mlx.reference.model import Hooks
from k3mlx.reference.state import LatentCache
from tests.tiny import random_config, write_random_model, write_spec_model

IDS = [1, 5, 2, 9, 3, 7, 11, 60, 23, 42]
LOGITS = {  # position -> first eight logits (§6.3)
    0: [1.193892, -0.7503186, -2.184265, -0.6219667, -1.520709, 0.02924840, 2.743996, 0.09008814],
    6: [1.101397, 0.4416911, 0.4052716, -0.5062897, 0.2514351, -0.5504562, -0.6854988, 0.5395516],
    9: [1.100091, 1.844858, 0.9501876, 0.4033916, -0.5490443, -0.4876955, -0.2315733, 0.7453330],
}


@pytest.fixture(scope="module")
def spec_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spec")
    write_spec_model(folder)
    return folder


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-6), ("float32", 5e-5)])
def test_specification_example(spec_model, dtype, tolerance):
    with k3mlx.load(spec_model, dtype=dtype) as engine:
        forward = engine.backend.forward
        first, _ = forward(IDS[:1], engine.backend.new_state(), False, Hooks())
        logits, state = forward(IDS[:7], engine.backend.new_state(), False, Hooks())
        np.testing.assert_allclose(first[:8], LOGITS[0], atol=tolerance)
        assert first.argmax() == 6
        np.testing.assert_allclose(logits[:8], LOGITS[6], atol=tolerance)
        assert logits.argmax() == 54
        np.testing.assert_allclose([logits.max(), logits.sum()], [2.627076, 4.948824], atol=4 * tolerance)
        for id in IDS[7:]:
            logits, state = forward([id], state, False, Hooks())
        np.testing.assert_allclose(logits[:8], LOGITS[9], atol=tolerance)
        assert logits.argmax() == 38
        np.testing.assert_allclose([logits.max(), logits.sum()], [3.299908, 5.768662], atol=4 * tolerance)

        kda, mla = state.layers[0].state, state.layers[2].rows()
        expected = [-0.006781698, 0.002896477, -0.05140612, -0.007464392]
        np.testing.assert_allclose(kda[0, 0, :4], expected, atol=tolerance)
        np.testing.assert_allclose(np.linalg.norm(kda), 3.573130, atol=tolerance)
        np.testing.assert_allclose(mla[0, :4], [0.7412860, 0.6609750, 0.1982654, -1.788441], atol=tolerance)
        np.testing.assert_allclose(mla[0, 16:], [0.3910157, 0.1945074, -0.4984566, 1.417772], atol=tolerance)


def assert_same_state(got, expected, tolerance):
    assert got.length == expected.length
    for name, array in expected.arrays().items():
        np.testing.assert_allclose(got.arrays()[name], array, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("experts", ["mxfp4", "plain"])
@pytest.mark.parametrize("seed", range(6))
def test_any_split_gives_the_same_logits_and_state(tmp_path, seed, experts):
    rng = np.random.default_rng(seed)
    config = random_config(rng, experts=experts)
    write_random_model(tmp_path, config, rng, experts=experts)
    with k3mlx.load(tmp_path, dtype="float64") as engine:
        forward, new_state = engine.backend.forward, engine.backend.new_state
        ids = rng.integers(0, engine.config.vocab_size, 75)
        whole, end = forward(ids, new_state(), True, Hooks())
        for cuts in ([1, 2, 3], [16, 17, 33], [74], sorted(rng.choice(np.arange(1, 75), 6, replace=False))):
            state, rows = new_state(), []
            for part in np.split(ids, cuts):
                logits, state = forward(part, state, True, Hooks())
                rows.append(logits)
            np.testing.assert_allclose(np.concatenate(rows), whole, atol=1e-9, err_msg=f"cuts {cuts}")
            assert_same_state(state, end, 1e-9)
        last, _ = forward(ids, new_state(), False, Hooks())
        np.testing.assert_allclose(last, whole[-1], atol=1e-9)


def test_forward_leaves_the_given_state_usable(spec_model):
    with k3mlx.load(spec_model, dtype="float64") as engine:
        forward = engine.backend.forward
        _, state = forward(IDS[:4], engine.backend.new_state(), False, Hooks())
        one, after_one = forward([7, 8], state, False, Hooks())
        forward([9, 10, 11], state, False, Hooks())  # another continuation of the same state
        again, after_again = forward([7, 8], state, False, Hooks())
        np.testing.assert_array_equal(one, again)
        assert_same_state(after_one, after_again, 0)


def test_latent_cache_never_overwrites_what_another_cache_sees():
    empty = LatentCache.empty(2, np.dtype(float))
    base = empty.append(np.ones((3, 2)))
    left = base.append(np.full((1, 2), 2.0))
    right = base.append(np.full((2, 2), 3.0))
    assert left.rows()[:, 0].tolist() == [1, 1, 1, 2]
    assert right.rows()[:, 0].tolist() == [1, 1, 1, 3, 3]
    assert base.rows()[:, 0].tolist() == [1, 1, 1]
    long = left
    for number in range(600):
        long = long.append(np.full((1, 2), float(number)))
    assert long.rows()[4:, 0].tolist() == list(range(600))
    assert left.rows()[:, 0].tolist() == [1, 1, 1, 2]
