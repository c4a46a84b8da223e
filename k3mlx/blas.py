"""Threads of numpy's BLAS. Owns the rule when they are held to one; otherwise they are what the machine gives.

The products of a small model are over before a second thread has woken up, and on a busy machine the threads wait for
one another: a prompt of 300 tokens took 20 times as long with two threads as with one. Where the C kernels compute the
large products, BLAS has small ones left for a few tokens, and its threads go on spinning for some 20 ms after each,
on the cores that the kernels need by then: a token took 1.4 times as long.
"""

from __future__ import annotations

from threadpoolctl import ThreadpoolController

SMALL_HIDDEN = 1024  # models of at most this hidden size run on one BLAS thread
FEW_TOKENS = 64  # passes of at most so many do so beside the C kernels


class BlasThreads:
    """Holds BLAS to one thread for passes that gain by it, until `restore`."""

    def __init__(self, hidden_size: int, native: bool = False) -> None:
        """native: whether the C kernels compute the dense products."""
        self._small, self._native = hidden_size <= SMALL_HIDDEN, native
        self._blas = ThreadpoolController().select(user_api="blas")
        self._limits = self._blas.limit(limits=1) if self._small else None

    def for_pass(self, tokens: int) -> None:
        """Set the threads for a pass of so many tokens; costs nothing while they stay the same."""
        one = self._small or (self._native and tokens <= FEW_TOKENS)
        if one and self._limits is None:
            self._limits = self._blas.limit(limits=1)
        elif not one:
            self.restore()

    def restore(self) -> None:
        """Give BLAS back the threads that it had."""
        if self._limits is not None:
            self._limits.restore_original_limits()
            self._limits = None
