"""Plans of memory: terms that add up, the smallest budget, and the cache under pressure."""

import logging
from dataclasses import replace

import pytest

from k3mlx import machine
from k3mlx.errors import ResourceError
from k3mlx.governor import LADDER, Governor, all_resident, plan_memory, smallest_memory, smallest_with
from k3mlx.machine import Available
from tests.needs import MB, NEEDS


def total(plan):
    return plan.process + plan.weights + plan.state + plan.activations + plan.reserve + plan.cache


@pytest.mark.parametrize("memory", [1_500, 2_000, 3_000, 5_000, 12_000, 40_000])
def test_terms_add_up_to_no_more_than_the_budget(memory):
    plan = plan_memory(NEEDS, memory * MB, None)
    assert total(plan) <= memory * MB
    assert plan.cache >= 16 * NEEDS.expert
    if plan.cache < 900 * NEEDS.expert and plan.dense_bytes_per_pass == 0:
        assert total(plan) > memory * MB - 18 * MB  # nothing is left lying about
    assert plan.chunk in LADDER
    assert set(plan.resident) <= set(range(10))
    kept = sum(NEEDS.dense.layers[n] for n in plan.resident)
    assert plan.dense_bytes_per_pass == (1_200 * MB - kept) // 2  # on disk they are half as large
    assert f"prompt chunk {plan.chunk}" in plan.lines()[0]


def test_weights_go_before_the_cache_and_all_stay_when_they_fit():
    assert plan_memory(NEEDS, 5_000 * MB, None).resident == tuple(range(10))
    short = plan_memory(NEEDS, 1_500 * MB, None)
    assert 0 < len(short.resident) < 10
    assert short.weights == 80 * MB + 400 * MB + 1_200 * MB - 2 * short.dense_bytes_per_pass
    assert "are read at every pass" in short.lines()[1]


@pytest.mark.parametrize("experts", [900, 16])
def test_the_smallest_budget_for_a_purpose(experts):
    """Also where the smallest of all serves it."""
    needs = replace(NEEDS, experts=experts)
    for enough in (all_resident, lambda plan: plan.cache >= experts * needs.expert, lambda plan: True):
        found = smallest_with(needs, enough)
        assert enough(plan_memory(needs, found, None))
        if found > smallest_memory(needs):
            assert not enough(plan_memory(needs, found - 1, None))
    assert smallest_with(needs, lambda plan: True) == smallest_memory(needs)
    alone = replace(needs, ring=None)  # nothing can be read at each pass
    assert smallest_with(alone, all_resident) == smallest_memory(alone)


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("cache", [None, 1_000 * MB])
@pytest.mark.parametrize("ring", [400 * MB, None])
def test_the_smallest_budget_works_and_one_byte_less_does_not(chunk, cache, ring):
    needs = replace(NEEDS, ring=ring)
    least = smallest_memory(needs, chunk, cache)
    plan = plan_memory(needs, least, cache, chunk)
    assert total(plan) <= least
    with pytest.raises(ResourceError, match=rf"memory of {least - 1} bytes .*expected at least {least}"):
        plan_memory(needs, least - 1, cache, chunk)


def test_the_chunk_depends_on_memory_and_not_on_the_cache():
    chunks = [
        plan_memory(NEEDS, memory * MB, None).chunk for memory in (1_500, 3_000, 9_000, 40_000, 900_000)
    ]
    assert chunks == [64, 256, 1024, 4096, 8192]
    for cache in (272 * MB, 2_000 * MB, 3_000 * MB):
        assert plan_memory(NEEDS, 9_000 * MB, cache).chunk == 1024
    assert plan_memory(NEEDS, 9_000 * MB, None, 77).chunk == 77


def test_a_cache_that_was_asked_for_is_granted_or_refused():
    assert plan_memory(NEEDS, 9_000 * MB, 3_000 * MB).cache == 3_000 // 17 * 17 * MB
    assert plan_memory(NEEDS, 9_000 * MB, 0).cache == 16 * 17 * MB
    with pytest.raises(ResourceError, match="too small"):
        plan_memory(NEEDS, 3_000 * MB, 3_000 * MB)


def test_the_automatic_budget_is_what_the_machine_has(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: Available(10_000 * MB, 16_000 * MB, "a test"))
    plan = plan_memory(NEEDS, None, None)
    assert plan.memory == 50 * MB + 9_000 * MB
    assert "automatic, from a test" in plan.lines()[0]
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert plan_memory(NEEDS, None, None).cache == 900 * NEEDS.expert


class FakeCache:
    least = 100

    def __init__(self):
        self.budget = 1_000
        self.asked = []

    def resize(self, budget):
        self.asked.append(budget)
        self.budget = max(self.least, min(self.budget, budget))
        return self.budget


@pytest.fixture
def governed(caplog):
    caplog.set_level(logging.WARNING, "k3mlx")
    cache, now, level, used = FakeCache(), [0.0], [0], [0]
    plan = plan_memory(NEEDS, 5_000 * MB, None)
    governor = Governor(plan, cache, lambda: level[0], lambda: used[0], lambda: now[0])
    return governor, cache, now, level, used


def test_pressure_shrinks_the_cache_and_it_stays_so(governed, caplog):
    governor, cache, now, level, _ = governed
    governor.check()
    assert cache.asked == []
    level[0] = machine.WARN
    governor.check()  # too soon after the last look
    assert cache.budget == 1_000
    now[0] = 1.0
    governor.check()
    assert cache.budget == 750
    assert "memory is short: expert cache 1 kB -> 750 B" in caplog.text
    now[0] = 1.5
    governor.check()  # what was given back takes a moment to show
    assert cache.budget == 750
    level[0] = machine.CRITICAL
    now[0] = 4.0
    governor.check()
    assert cache.budget == 375
    level[0] = 0
    for now[0] in range(5, 50):
        governor.check()
    assert cache.budget == 375  # never back: what was given up once would be taken back and given up again
    assert governor.report()["shrinks"] == 2


def test_a_process_that_outgrows_its_budget_gives_back_the_excess(governed):
    governor, cache, now, _, used = governed
    used[0], now[0] = governor.plan.memory + 300, 1.0
    governor.check()
    assert cache.budget == 700
    used[0], now[0] = governor.plan.memory, 9.0
    governor.check()
    assert cache.budget == 700


def test_at_its_smallest_the_cache_is_left_alone(governed, caplog):
    governor, cache, now, level, _ = governed
    level[0] = machine.CRITICAL
    for now[0] in range(1, 100, 5):
        governor.check()
    assert cache.budget == 100
    before = governor.shrinks
    now[0] = 200.0
    caplog.clear()
    governor.check()
    assert governor.shrinks == before
    assert caplog.text == ""
