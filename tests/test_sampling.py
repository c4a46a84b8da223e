"""Sampling: each filter alone, their edges, seeds, and values out of range."""

import numpy as np
import pytest

from k3mlx.errors import UsageError
from k3mlx.sampling import Sampler, SamplingOptions

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))


def drawn(count=2000, logits=LOGITS, **options):
    sampler = Sampler(SamplingOptions(**({"top_p": 1.0, "seed": 1} | options)))
    return [sampler(logits) for _ in range(count)]


def test_greedy_takes_the_lowest_id_among_equals():
    assert Sampler(SamplingOptions(temp=0))(np.array([1.0, 3.0, 3.0, 2.0])) == 1


def test_frequencies_follow_the_distribution():
    counts = np.bincount(drawn(20_000), minlength=5) / 20_000
    np.testing.assert_allclose(counts, np.exp(LOGITS), atol=0.012)


def test_temperature_sharpens():
    share = np.mean(np.array(drawn(5000, temp=0.5)) == 1)
    assert share == pytest.approx(0.16 / (0.0025 + 0.16 + 0.01 + 0.09 + 0.0225), abs=0.03)


def test_top_k_keeps_k_and_more_than_the_vocabulary_keeps_all():
    assert set(drawn(top_k=2)) == {1, 3}
    assert drawn(200, top_k=99) == drawn(200, top_k=0)


def test_top_k_of_equal_logits_keeps_the_lowest_ids():
    assert set(drawn(logits=np.zeros(6, np.float32), top_k=2)) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    assert set(drawn(top_p=0.4)) == {1}
    assert set(drawn(top_p=0.41)) == {1, 3}
    assert set(drawn(top_p=0.0)) == {1}


def test_min_p_is_relative_to_the_most_probable():
    assert set(drawn(min_p=0.3)) == {1, 3, 4}
    assert set(drawn(min_p=1.0)) == {1}


def test_filters_apply_after_temperature():
    assert set(drawn(temp=0.25, top_p=0.6)) == {1}
    assert set(drawn(temp=4.0, top_p=0.6)) == {1, 3, 4}


def test_a_seed_repeats_and_zero_is_a_seed():
    assert drawn(50, seed=0) == drawn(50, seed=0)
    assert drawn(50, seed=0) != drawn(50, seed=1)
    assert drawn(50, seed=None) != drawn(50, seed=None)


def test_extreme_logits_do_not_overflow():
    assert drawn(10, logits=np.array([3e38, -3e38, 0], np.float32)) == [0] * 10
    assert drawn(10, logits=np.array([88, 0], np.float32), temp=1e-3) == [0] * 10


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temp", -0.1),
        ("temp", float("nan")),
        ("temp", float("inf")),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", 2.0),
        ("top_k", -1),
        ("seed", -1),
    ],
)
def test_values_out_of_range_are_named(option, value):
    with pytest.raises(UsageError, match=f"{option} is {value}"):
        SamplingOptions(**{option: value})
