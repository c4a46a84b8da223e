"""BLAS threads: one for a small model while it is open, what there was before and after."""

from threadpoolctl import threadpool_info, threadpool_limits

import k3mlx
from k3mlx.blas import FEW_TOKENS, SMALL_HIDDEN, BlasThreads


def threads():
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_small_models_run_on_one_thread_until_closed(byte_model):
    before = threads()
    with k3mlx.load(byte_model, backend="numpy"):
        assert threads() == [1] * len(before)
    assert threads() == before


def test_few_tokens_beside_the_c_kernels_run_on_one_thread():
    before = threads()
    with threadpool_limits(3, user_api="blas"):
        many = threads()
        limits = BlasThreads(SMALL_HIDDEN + 1, native=True)
        assert threads() == many
        for tokens, expected in ((1, 1), (FEW_TOKENS, 1), (FEW_TOKENS + 1, 3), (2000, 3), (1, 1)):
            limits.for_pass(tokens)
            assert threads() == [expected] * len(before), f"{tokens} tokens"
        limits.restore()
        assert threads() == many
    assert threads() == before


def test_large_models_keep_the_threads():
    before = threads()
    limits = BlasThreads(SMALL_HIDDEN + 1)
    limits.for_pass(1)
    assert threads() == before
    limits.restore()
    assert threads() == before
