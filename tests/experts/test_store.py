"""The store: what it hands out is what is on disk, within its budget, in any order of requests."""

import os
import threading
import time
import weakref

import numpy as np
import pytest

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.errors import ModelFilesError, ResourceError
from k3mlx.experts import files as files_module
from k3mlx.experts.options import StreamOptions
from k3mlx.experts.policies import POLICIES
from k3mlx.experts.slots import ALIGN, NumpySlots, SlotMemory, aligned_view
from k3mlx.experts.store import ExpertStore

from .models import assert_holds, deadline, nothing_left_behind


def options(**changed):
    return StreamOptions(**({"direct_io": "off", "io_threads": 2} | changed))


def slots(checkpoint, count):
    """The budget of that many experts."""
    return count * sum(info.nbytes for info in checkpoint.expert_tensors(1, 0).values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize("pipe", [True, False])
@pytest.mark.parametrize("capacity", [3, 5, 27])
def test_every_request_gets_the_bytes_on_disk(streaming_folder, policy, direct, pipe, capacity):
    rng = np.random.default_rng(capacity)
    with nothing_left_behind(), deadline(30), Checkpoint.open(streaming_folder) as checkpoint:
        store = ExpertStore(
            checkpoint, slots(checkpoint, capacity), options(policy=policy, direct_io=direct, pipe=pipe)
        )
        wanted = reads = 0
        for turn in range(60):
            layer = int(rng.integers(1, 4))
            experts = rng.permutation(9)[: rng.integers(1, 10)].tolist()
            before = set(store.residents())
            if turn % 3 == 0:
                store.prefetch(layer % 3 + 1, rng.permutation(9)[:2])
            in_order, most = bool(rng.integers(2)), int(rng.integers(1, 5))
            whole = bool(rng.integers(2)) and most <= capacity
            got = []
            with store.request(layer, experts, in_order) as request:
                for group in request.groups(most, whole):
                    assert 1 <= len(group) <= most
                    for held in group:
                        assert_holds(held, checkpoint, layer)
                    got += [held.expert for held in group]
                    assert len(store.entries) <= capacity
            assert sorted(got) == sorted(experts)
            assert not in_order or got == experts
            assert len({(layer, e) for e in experts} & before) <= len(experts)
            wanted += len(experts)
        counters = store.counters
        assert counters.hits + counters.misses == wanted
        reads = counters.bytes_read // store.payload
        assert counters.bytes_read % store.payload == 0
        assert reads >= counters.misses - counters.hits
        if capacity == 27:
            assert counters.evictions == 0
            assert reads <= 27
        assert store.reading <= capacity
        store.close()


def test_held_slots_are_not_refilled(checkpoint):
    store = ExpertStore(checkpoint, slots(checkpoint, 4), options(io_threads=4))
    with store.request(1, [0, 1, 2]) as first:
        groups = first.groups(3, whole=True)
        group = next(groups)
        for layer in (2, 3):  # all other experts through the one slot that is left
            for held in store.fetch(layer, range(9)):
                assert_holds(held, checkpoint, layer)
        for held in group:
            assert_holds(held, checkpoint, 1)
    store.close()


def test_earlier_groups_stay_while_they_are_kept(checkpoint):
    store = ExpertStore(checkpoint, slots(checkpoint, 6), options())
    with store.request(1, range(9)) as request:
        earlier = []
        for group in request.groups(2, whole=True, keep=1):
            for held in earlier + group:
                assert_holds(held, checkpoint, 1)
            earlier = group
    with pytest.raises(ResourceError, match="8 experts are to be held at once, the cache has room for 6"):
        next(store.request(1, range(9)).groups(4, whole=True, keep=1))
    store.close()


def test_a_store_whose_slots_are_all_held_says_so(checkpoint):
    with deadline(5):
        store = ExpertStore(checkpoint, slots(checkpoint, 3), options())
        with store.request(1, [0, 1, 2]) as request:
            groups = request.groups(3, whole=True)
            next(groups)
            with pytest.raises(ResourceError, match="layer 2: all 3 slots of the expert cache are in use"):
                list(store.fetch(2, [0]))
        assert [held.expert for held in store.fetch(2, [0, 7])] == [0, 7]
        store.close()


def test_the_smallest_budget_and_what_is_below_it(checkpoint):
    least = slots(checkpoint, 3)
    assert ExpertStore(checkpoint, 0, options()).capacity == 3
    assert ExpertStore(checkpoint, least, options()).capacity == 3
    with pytest.raises(ResourceError, match=f"of {least - 1} bytes is too small: expected at least {least}"):
        ExpertStore(checkpoint, least - 1, options())
    assert ExpertStore(checkpoint, None, options()).capacity == 27
    assert ExpertStore(checkpoint, 10**12, options()).capacity == 27


def test_counts_of_a_known_sequence(checkpoint):
    store = ExpertStore(checkpoint, slots(checkpoint, 4), options())
    list(store.fetch(1, [0, 1, 2]))
    list(store.fetch(1, [2, 3]))
    list(store.fetch(2, [0, 1]))  # drops 1/0 and 1/1
    list(store.fetch(1, [0, 3]))  # 3 stayed, 0 comes back for 1/2
    counters = store.counters
    assert (counters.hits, counters.misses, counters.evictions) == (2, 7, 3)
    assert counters.bytes_read == 7 * store.payload
    assert store.residents() == [(1, 0), (1, 3), (2, 1), (2, 0)] or store.residents()[:1] == [(1, 0)]
    report = store.report()
    assert report["resident_bytes"] == report["cache_bytes"] == 4 * store.payload
    store.close()


def test_a_miss_never_drops_what_the_request_still_needs(checkpoint):
    store = ExpertStore(checkpoint, slots(checkpoint, 5), options(io_threads=1))
    list(store.fetch(1, [0, 1, 2, 3]))
    before = store.counters.bytes_read
    got = [held.expert for held in store.fetch(1, [5, 6, 7, 8, 0, 1, 2, 3])]
    assert got == [5, 6, 7, 8, 0, 1, 2, 3]
    assert store.counters.bytes_read - before == 4 * store.payload  # the four in memory were not read again
    store.close()


def test_resident_experts_wanted_later_give_way_when_nothing_else_can(checkpoint):
    with deadline(10):
        store = ExpertStore(checkpoint, slots(checkpoint, 3), options())
        list(store.fetch(1, [6, 7, 8]))
        assert [held.expert for held in store.fetch(1, range(9))] == list(range(9))
        assert store.counters.misses == 9
        store.close()


def test_shrinking_gives_slots_back_and_growing_takes_them(checkpoint):
    class Counting(NumpySlots):
        alive = 0

        def allocate(self, nbytes):
            Counting.alive += 1
            return super().allocate(nbytes)

        def release(self, memory):
            Counting.alive -= 1

    store = ExpertStore(checkpoint, slots(checkpoint, 20), options(), Counting())
    list(store.fetch(1, range(9)))
    list(store.fetch(2, range(9)))
    assert Counting.alive == 18
    with store.request(2, [0, 1]) as request:
        groups = request.groups(2, whole=True)
        held = next(groups)
        assert store.resize(slots(checkpoint, 7)) == slots(checkpoint, 7)
        assert Counting.alive == 7
        for one in held:
            assert_holds(one, checkpoint, 2)
    for one in store.fetch(3, range(9)):
        assert_holds(one, checkpoint, 3)
    assert Counting.alive == 7
    assert store.resize(1) == store.smallest_budget  # never below what works
    assert Counting.alive == 3
    store.resize(slots(checkpoint, 27))
    list(store.fetch(3, range(9)))
    assert Counting.alive == 9
    store.close()
    assert Counting.alive == 0


def test_memory_that_cannot_be_had_makes_the_cache_smaller(checkpoint):
    class Poor(NumpySlots):
        left = 4

        def allocate(self, nbytes):
            if not self.left:
                raise MemoryError
            self.left -= 1
            return super().allocate(nbytes)

    store = ExpertStore(checkpoint, None, options(), Poor())
    assert [held.expert for held in store.fetch(1, range(9))] == list(range(9))
    assert store.capacity == 4
    store.close()


def test_slots_of_another_owner(checkpoint):
    threads = set()

    class Owned:
        def allocate(self, nbytes):
            threads.add(threading.get_ident())
            owner = np.zeros(nbytes + ALIGN + 8, np.uint8)
            view, start = aligned_view(owner[8:])
            return SlotMemory(view, owner, start + 8)

        def release(self, memory):
            threads.add(threading.get_ident())

    store = ExpertStore(checkpoint, slots(checkpoint, 4), options(direct_io="on"), Owned())
    for held in store.fetch(2, range(9)):
        assert held.memory.bytes.ctypes.data % ALIGN == 0
        for name, part in held.placement.parts.items():
            start = held.memory.start + part.start
            piece = held.memory.owner[start : start + part.nbytes]
            np.testing.assert_array_equal(piece.view(part.dtype).reshape(part.shape), held.parts[name])
    store.close()
    assert threads == {threading.get_ident()}


def slow_reads(monkeypatch, seconds, only=lambda offset: True):
    whole, started = os.preadv, []

    def slow(descriptor, buffers, offset):
        started.append(offset)
        if only(offset):
            time.sleep(seconds)
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(files_module.os, "preadv", slow)
    return started


def test_reads_go_on_while_the_caller_computes(checkpoint, monkeypatch):
    slow_reads(monkeypatch, 0.05)
    store = ExpertStore(checkpoint, slots(checkpoint, 9), options(io_threads=2))
    request = store.request(1, range(6))
    time.sleep(0.3)  # three rounds of two reads
    with deadline(0.1), request:
        assert len(list(request.groups())) == 6
    assert store.counters.wait_seconds < 0.1
    store.close()


def test_without_the_pipe_nothing_is_read_before_it_is_asked_for(checkpoint, monkeypatch):
    started = slow_reads(monkeypatch, 0.01)
    store = ExpertStore(checkpoint, slots(checkpoint, 4), options(pipe=False, io_threads=4))
    request = store.request(1, range(6), in_order=False)
    time.sleep(0.05)
    assert not started
    groups = request.groups()
    next(groups)
    done = len(started)
    assert done == 4
    time.sleep(0.05)
    next(groups)
    assert len(started) == done  # nothing is read while the caller computes
    assert len(list(groups)) == 4
    store.close()


def test_those_in_memory_come_first_when_the_order_is_free(checkpoint, monkeypatch):
    store = ExpertStore(checkpoint, None, options(io_threads=1))
    list(store.fetch(1, [4, 7]))
    slow_reads(monkeypatch, 0.02)
    with store.request(1, [1, 2, 4, 7], in_order=False) as request:
        got = [held.expert for group in request.groups() for held in group]
    assert got[:2] == [4, 7]
    store.close()


def test_a_request_left_half_way_leaves_the_store_usable(checkpoint, monkeypatch):
    slow_reads(monkeypatch, 0.01)
    with deadline(10), nothing_left_behind():
        store = ExpertStore(checkpoint, slots(checkpoint, 4), options())
        for _ in range(5):
            with store.request(1, range(9)) as request:
                next(request.groups(2))
            generator = store.fetch(2, range(9))
            next(generator)
            generator.close()
        for held in store.fetch(3, range(9)):
            assert_holds(held, checkpoint, 3)
        assert not any(entry.wanted or entry.holds for entry in store.entries.values())
        store.close()


def test_closing_with_reads_in_flight(checkpoint, monkeypatch):
    slow_reads(monkeypatch, 0.05)
    with deadline(5), nothing_left_behind():
        store = ExpertStore(checkpoint, None, options(io_threads=2))
        store.request(1, range(9))
        store.close()


def test_prefetched_experts_are_used_or_counted_as_wasted(checkpoint):
    store = ExpertStore(checkpoint, slots(checkpoint, 8), options())
    list(store.fetch(1, [0, 1, 2]))
    store.prefetch(2, [3, 4, 5])
    while store.reading:
        time.sleep(0.001)
    assert store.counters.bytes_read == 6 * store.payload
    for held in store.fetch(2, [3, 5, 8]):
        assert_holds(held, checkpoint, 2)
    counters = store.counters
    assert counters.prefetch_useful_bytes == 2 * store.payload
    assert counters.prefetch_wasted_bytes == store.payload
    assert (counters.hits, counters.misses) == (2, 4)
    list(store.fetch(3, [0, 1]))  # the eighth slot, then the wasted one goes before anything that was used
    assert (2, 4) not in store.residents()
    assert len(store.residents()) == 8
    store.close()


def test_what_is_handed_out_is_one_object_as_long_as_the_expert_is_in_memory(checkpoint):
    store = ExpertStore(checkpoint, slots(checkpoint, 3), options())
    first, again = (next(store.fetch(1, [0])) for _ in range(2))
    assert again is first
    gone = weakref.ref(first)
    del first, again
    list(store.fetch(2, [0, 1, 2]))
    assert gone() is None  # nor is its slot kept by it
    assert_holds(next(store.fetch(1, [0])), checkpoint, 1)
    store.close()


def test_a_prefetch_takes_no_slot_that_a_request_needs(checkpoint):
    store = ExpertStore(checkpoint, slots(checkpoint, 3), options())
    with store.request(1, [0, 1, 2]) as request:
        store.prefetch(2, [0, 1, 2])
        assert [key for key in store.entries if key[0] == 2] == []
        assert [held.expert for group in request.groups() for held in group] == [0, 1, 2]
    store.close()


def test_a_prefetch_gives_way_to_a_demand(checkpoint, monkeypatch):
    started = slow_reads(monkeypatch, 0.02)
    store = ExpertStore(checkpoint, None, options(io_threads=1))
    store.prefetch(2, range(9))
    list(store.fetch(1, [0, 1]))
    assert store.counters.misses == 2
    assert len(started) <= 4  # one of the prefetch, perhaps, then the two that were demanded
    list(store.fetch(2, [8]))
    assert [key for key in store.residents() if key == (2, 8)]
    store.close()


def test_the_warm_start_fills_empty_slots_only(checkpoint):
    store = ExpertStore(checkpoint, slots(checkpoint, 5), options())
    list(store.fetch(1, [0, 1, 2]))
    store.warm([(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
    for _ in range(400):
        with store.lock:
            store.pump_warm()
            if not store.reading and not store._has_empty_slot():
                break
        time.sleep(0.005)
    assert sorted(store.residents()) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert store.counters.warm_bytes == 2 * store.payload
    assert store.counters.evictions == 0
    store.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_read_that_fails_once_is_done_again(checkpoint, monkeypatch, in_order):
    whole, failed = os.preadv, []

    def fail_once(descriptor, buffers, offset):
        if not failed:
            failed.append(offset)
            raise OSError(5, "Input/output error")
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(files_module.os, "preadv", fail_once)
    with deadline(5), nothing_left_behind():
        store = ExpertStore(checkpoint, slots(checkpoint, 4), options())
        with store.request(1, range(9), in_order) as request:
            for group in request.groups():
                assert_holds(group[0], checkpoint, 1)
        assert store.counters.retries == 1
        store.close()
    assert failed


@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize("in_order", [True, False])
def test_reads_that_keep_failing_are_an_error_with_the_place(checkpoint, monkeypatch, direct, in_order):
    def fail(descriptor, buffers, offset):
        raise OSError(5, "Input/output error")

    with deadline(5), nothing_left_behind():
        store = ExpertStore(checkpoint, slots(checkpoint, 4), options(direct_io=direct))
        with monkeypatch.context() as patch:
            patch.setattr(files_module.os, "preadv", fail)
            message = r"model-0000\d-of-000003\.safetensors: reading \d+ bytes at \d+ failed " \
                r"\(Input/output error\) \(layer 1, expert \d, tried twice\)"  # fmt: skip
            with pytest.raises(ModelFilesError, match=message), store.request(1, [3, 4], in_order) as request:
                list(request.groups())
            while store.reading:
                time.sleep(0.001)
        for held in store.fetch(1, range(9)):  # the disk is well again, and so is the store
            assert_holds(held, checkpoint, 1)
        store.close()
