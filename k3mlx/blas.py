"""Threads of numpy's BLAS. Owns the rule for small models; big ones keep what the machine gives.

The products of a small model are over before a second thread has woken up, and on a busy machine the
threads wait for one another: a prompt of 300 tokens took 20 times as long with two threads as with one.
"""

from __future__ import annotations

from threadpoolctl import threadpool_limits

SMALL_HIDDEN = 1024  # models of at most this hidden size run on one BLAS thread


class BlasThreads:
    """Holds BLAS to one thread for a small model until `restore`; does nothing for a large one."""

    def __init__(self, hidden_size: int) -> None:
        self._limits = threadpool_limits(1, user_api="blas") if hidden_size <= SMALL_HIDDEN else None

    def restore(self) -> None:
        """Give BLAS back the threads that it had."""
        if self._limits is not None:
            self._limits.restore_original_limits()
            self._limits = None
