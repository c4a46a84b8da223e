"""Cache policies against models written plainly, and the optimum against trying everything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3mlx.errors import UsageError
from k3mlx.experts.policies import POLICIES, DecayedFrequency, S3Fifo, belady_misses, make_policy

TRACES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=60)


def run(policy, trace, capacity, busy=lambda key: False):
    """Misses of a cache with that policy, checking that it never loses or invents a resident."""
    resident, misses = set(), 0
    for key in trace:
        if key in resident:
            policy.touch(key)
        else:
            misses += 1
            if len(resident) == capacity:
                victim = policy.victim(lambda k: not busy(k))
                assert victim in resident
                assert not busy(victim)
                policy.remove(victim)
                resident.remove(victim)
            policy.insert(key)
            resident.add(key)
        assert sorted(policy.residents()) == sorted(resident)
    return misses


@pytest.mark.parametrize("name", POLICIES)
@given(trace=TRACES, capacity=st.integers(2, 7))
@settings(deadline=None, max_examples=60)
def test_no_policy_beats_the_optimum_and_the_busy_are_never_victims(name, trace, capacity):
    misses = run(make_policy(name, capacity), trace, capacity)
    assert belady_misses(trace, capacity) <= misses <= len(trace)
    run(make_policy(name, capacity), trace, capacity, busy=lambda key: key == (0, 0))


@given(trace=st.lists(st.tuples(st.just(0), st.integers(0, 3)), max_size=8), capacity=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_belady_is_the_best_of_all_ways_to_evict(trace, capacity):
    def fewest(position, resident):
        if position == len(trace):
            return 0
        key = trace[position]
        if key in resident:
            return fewest(position + 1, resident)
        if len(resident) < capacity:
            return 1 + fewest(position + 1, resident | {key})
        return 1 + min(fewest(position + 1, (resident - {old}) | {key}) for old in resident)

    assert belady_misses(trace, capacity) == fewest(0, frozenset())


@given(trace=TRACES, capacity=st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_lru_drops_the_key_whose_last_use_is_oldest(trace, capacity):
    policy, last = make_policy("lru", capacity), {}
    for time, key in enumerate(trace):
        if key in last:
            policy.touch(key)
        else:
            if len(last) == capacity:
                victim = policy.victim(lambda k: True)
                assert victim == min(last, key=last.get)
                policy.remove(victim)
                del last[victim]
            policy.insert(key)
        last[key] = time
    assert policy.residents() == sorted(last, key=last.get, reverse=True)


@given(uses=st.lists(st.integers(0, 4), min_size=1, max_size=40))
@settings(deadline=None, max_examples=60)
def test_decayed_frequency_orders_by_the_decayed_sum_of_uses(uses):
    half_life = 3.0
    policy, times = DecayedFrequency(8, half_life), {}
    for time, expert in enumerate(uses):
        key = 0, expert
        (policy.touch if key in times else policy.insert)(key)
        times.setdefault(key, []).append(time)
    values = {k: sum(2.0 ** (use / half_life) for use in used) for k, used in times.items()}
    victim = policy.victim(lambda key: True)
    assert values[victim] == pytest.approx(min(values.values()))
    ordered = [values[key] for key in policy.residents()]
    assert ordered == pytest.approx(sorted(values.values(), reverse=True))


def test_decayed_frequency_keeps_what_is_used_often_against_a_scan():
    policy = DecayedFrequency(4, half_life=50)
    for key in [(0, 0)] * 6 + [(0, 1), (0, 2), (0, 3)]:
        (policy.touch if key in policy.residents() else policy.insert)(key)
    assert policy.victim(lambda key: True) == (0, 1)
    assert policy.residents()[0] == (0, 0)


def test_s3fifo_lets_a_scan_pass_and_remembers_what_comes_back():
    policy = S3Fifo(10, small_share=0.2)  # two places for newcomers
    hot = [(0, n) for n in range(3)]
    for key in hot:
        policy.insert(key)
        policy.touch(key)
    for n in range(3, 10):
        policy.insert((0, n))
    for n in range(10, 40):
        victim = policy.victim(lambda key: True)
        assert victim not in hot
        policy.remove(victim)
        policy.insert((0, n))
    assert set(hot) <= set(policy.residents())
    policy.insert((0, 32))  # dropped lately: goes to the main queue at once
    assert (0, 32) in policy._main


@pytest.mark.parametrize("name", POLICIES)
def test_demoted_keys_go_first(name):
    policy = make_policy(name, 8)
    for n in range(8):
        policy.insert((0, n))
    for n in range(8):
        policy.touch((0, n))
    policy.demote((0, 6))
    assert policy.victim(lambda key: True) == (0, 6)
    policy.remove((0, 6))
    assert policy.victim(lambda key: True) != (0, 6)


def test_long_runs_stay_small():
    policy, rng = DecayedFrequency(10), np.random.default_rng(0)
    run(policy, [(0, int(n)) for n in rng.integers(0, 30, 5000)], 10)
    assert len(policy._heap) < 200
    assert len(policy._past) <= 20


def test_unknown_policy():
    with pytest.raises(UsageError, match="cache policy is 'clock', expected one of lru, decayed, s3fifo"):
        make_policy("clock", 4)
