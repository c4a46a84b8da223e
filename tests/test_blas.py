"""BLAS threads: one for a small model while it is open, what there was before and after."""

from threadpoolctl import threadpool_info

import k3mlx
from k3mlx.blas import SMALL_HIDDEN, BlasThreads


def threads():
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_small_models_run_on_one_thread_until_closed(byte_model):
    before = threads()
    with k3mlx.load(byte_model, backend="numpy"):
        assert threads() == [1] * len(before)
    assert threads() == before


def test_large_models_keep_the_threads():
    before = threads()
    limits = BlasThreads(SMALL_HIDDEN + 1)
    assert threads() == before
    limits.restore()
    assert threads() == before
