"""Memory that is lent to layers in turn: views of it, and used again only after an evaluation."""

import math

import mlx.core as mx
import numpy as np
import pytest

from k3mlx.dense_memory import GRAIN
from k3mlx.model.region import HOST, Region

SHAPE = (3, 5)  # no more than 64 bytes in any dtype


@pytest.fixture
def count():
    return [0]


@pytest.fixture
def region(count):
    return Region(3 * GRAIN, lambda: count[0])


def lend(region, layer, shape, dtype):
    region.reserve(layer, [math.prod(shape) * dtype.size])
    return region.lend(shape, dtype)


@pytest.mark.parametrize("dtype", HOST)
def test_what_the_host_writes_is_what_mlx_computes_with(region, dtype):
    lend(region, 7, SHAPE, dtype)
    array, view = lend(region, 7, SHAPE, dtype)
    assert array.shape == view.shape == SHAPE
    assert array.dtype == dtype
    for start in (1, 40):
        view[...] = np.arange(start, start + 15).reshape(SHAPE)
        bits = array.view(mx.uint16) if dtype == mx.bfloat16 else array
        np.testing.assert_array_equal(np.array(mx.add(bits, 0)), view)


def test_memory_rests_until_an_evaluation_has_been_waited_for(region, count):
    lent = [lend(region, 0, SHAPE, mx.float32), lend(region, 1, SHAPE, mx.float32)]
    places = [view.ctypes.data for _, view in lent]
    region.drop(0)
    assert lend(region, 2, SHAPE, mx.float32) is not None  # the third place
    assert lend(region, 3, SHAPE, mx.float32) is None
    count[0] += 1
    region.drop(1)
    _, view = lend(region, 3, SHAPE, mx.float32)
    assert view.ctypes.data == places[0]
    assert lend(region, 3, SHAPE, mx.float32) is None  # layer 1 was dropped after it
    count[0] += 1
    _, view = lend(region, 3, SHAPE, mx.float32)
    assert view.ctypes.data == places[1]


def test_a_layer_that_was_lent_nothing_may_be_dropped(region):
    region.drop(5)
    assert lend(region, 0, (4 * GRAIN,), mx.uint8) is None


def test_a_large_region_is_several_arrays(monkeypatch):
    monkeypatch.setattr("k3mlx.model.region._BLOCK", 2 * GRAIN)
    region = Region(5 * GRAIN, lambda: 0)
    taken = [lend(region, 0, SHAPE, mx.float32) for _ in range(6)]
    assert [lent is None for lent in taken] == [False] * 5 + [True]
    assert len({view.ctypes.data for _, view in taken[:5]}) == 5


def test_the_largest_find_room_first_whatever_their_order(count):
    region = Region(4 * GRAIN, lambda: count[0])
    lend(region, 0, (2 * GRAIN,), mx.uint8)
    lend(region, 1, (GRAIN,), mx.uint8)
    region.drop(0)
    count[0] += 1  # free: two grains, and one behind layer 1
    region.reserve(2, [GRAIN, 2 * GRAIN])
    lent = [region.lend((size * GRAIN,), mx.uint8) for size in (1, 2)]
    assert None not in lent
