"""A queue of jobs for the CPU kernels, run in one call when somebody needs a result.

Between two calls of a token's pass the weights have driven Python's own code and data from the caches, so that a few
lines of it take as long as a small product. Owns the records of the jobs and the arrays that are not yet computed;
which jobs there are is the caller's (`cpu_parts.py`), their arithmetic is in custom_kernels/cpu.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from k3mlx.clock import Clock
from k3mlx.errors import ResourceError, UsageError

from .cpu import CpuKernels, load_library

F32 = NDArray[np.float32]
ROOM = 1 << 16  # floats: results of some jobs lie in one array, few enough for malloc to have it in a cache
ALIGN = 16  # floats between their beginnings


class Kind(IntEnum):
    """enum k3_kind of k3cpu.h."""

    PRODUCTS, EXPERTS, KDA, ATTENTION, DEPTH_MIX, NORM, SUM, GATE, ROUTE, COPY = range(10)


# The members of the jobs' records in k3cpu.h, of eight bytes each. PRODUCTS and DEPTH_MIX end with arrays of pointers.
FIELDS = {
    Kind.PRODUCTS: "count tokens x",
    Kind.EXPERTS: "matrices experts tokens width start token weight x out finite beta linear_beta",
    Kind.KDA: "tokens heads width taps q k v z gate b windows state tap A_log dt_bias o_norm y new_windows new_state"
    " lower_bound eps l2_eps",
    Kind.ATTENTION: "tokens heads nope ext rank value cached q rows maps out scale",
    Kind.DEPTH_MIX: "tokens width count norm query out eps",
    Kind.NORM: "tokens width rest x weight out eps",
    Kind.SUM: "count a b out",
    Kind.GATE: "count a b out",
    Kind.ROUTE: "tokens experts chosen logits bias ids weights scaling",
    Kind.COPY: "count a b out",
}


class Later:
    """A float32 array, C-contiguous, that a queue still has to compute. `np.asarray` makes the queue run and gives the
    array; `+` is queued as well. Anything else that numpy would do with it is refused (TypeError), not done too early.
    """

    __slots__ = ("_first", "_room", "address", "queue", "shape")
    __array_ufunc__ = None
    dtype = np.dtype(np.float32)

    def __init__(self, queue: Queue, shape: tuple[int, ...], room: F32, first: int, address: int) -> None:
        """The part of `room` [any] from element `first` on, which is at `address`."""
        self.queue = queue
        self.shape = shape
        self.address = address
        self._room = room
        self._first = first

    @property
    def array(self) -> F32:
        """Where the values will be: they are undefined until the queue has run."""
        return self._room[self._first : self._first + prod(self.shape)].reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: int) -> Later:
        """The same values in another shape."""
        if prod(shape) != prod(self.shape):
            raise UsageError(f"an array {self.shape} cannot be reshaped to {shape}")
        return Later(self.queue, shape, self._room, self._first, self.address)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        self.queue.run()
        return np.array(self.array, dtype, copy=copy)

    def __add__(self, other: Any) -> Any:
        return self.queue.pairs(Kind.SUM, self, other)

    def __radd__(self, other: Any) -> Any:
        return self.queue.pairs(Kind.SUM, other, self)


class Queue:
    """Jobs in the order in which they were added, for one thread. `clock`, if there is one, is told what part of the
    model each job's time belongs to: the part that it was in when the job was added."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self.clock: Clock | None = None
        self._room = np.empty(0, np.float32)  # memory for results
        self._used, self._base = 0, 0  # floats of it, and its address
        self.clear()

    def clear(self) -> None:
        """Forget the jobs: whatever waits for them is undefined from now on."""
        self._words: list[int] = []  # kind, number of fields and fields of each job
        self._parts: list[str] = []
        self.kept: list[Any] = []  # what the jobs point at; callers may add to it

    def later(self, shape: tuple[int, ...]) -> Later:
        """Room for the result of a job."""
        size, first = prod(shape), self._used
        if first + size > len(self._room):
            self._room, first = np.empty(max(ROOM, size), np.float32), 0
            self._base = address(self._room)
        self._used = first + -(-size // ALIGN) * ALIGN
        return Later(self, shape, self._room, first, self._base + 4 * first)

    def at(self, array: Any) -> int:
        """Where an array of floats, or what is computed later, is for a job that is added next."""
        if isinstance(array, Later):
            self.kept.append(array)
            return array.address
        flags = array.flags
        if array.dtype != np.float32 or not (flags.c_contiguous and flags.aligned):
            array = np.require(array, np.float32, ["C", "A"])
        return self.keep(array)

    def keep(self, array: NDArray[Any]) -> int:
        """Where an array is, as it is, for a job that is added next."""
        self.kept.append(array)
        return address(array)

    def add(self, kind: Kind, *fields: int) -> None:
        """A job with the fields of its record; numbers of C's type double as `bits`."""
        self._words += (kind, len(fields), *fields)
        self._parts.append("" if self.clock is None else self.clock.part)

    def pairs(self, kind: Kind, a: Any, b: Any) -> Later:
        """SUM, a + b, or GATE, a sigmoid(b), of the same shape."""
        if a.shape != b.shape:
            raise UsageError(f"arrays {a.shape} and {b.shape}; expected the same shape")
        out = self.later(a.shape)
        self.add(kind, prod(a.shape), self.at(a), self.at(b), self.at(out))
        return out

    def experts(
        self, x: Any, records: NDArray[np.uint8], weights: F32, beta: float, linear_beta: float
    ) -> tuple[Later, ctypes.c_int64]:
        """The gated MLPs `records` [experts, any] (`stack_experts`) of x [T, L] times weights [experts], summed in
        their order: [T, L], and whether all of it is finite (0 or 1, once the queue has run)."""
        (tokens, width), count = x.shape, len(records)
        out, finite = self.later(x.shape), ctypes.c_int64()
        start, token = _every(count, tokens)
        self.kept.append(finite)
        self.add(
            Kind.EXPERTS, self.keep(records), count, tokens, width, start[1], token[1],
            self.keep(np.repeat(weights, tokens)), self.at(x), self.at(out), ctypes.addressof(finite),
            bits(beta), bits(linear_beta),
        )  # fmt: skip
        return out, finite

    def run(self) -> None:
        """Do all jobs, and add their time to the kernels'. Raises MemoryError, after which there are no jobs."""
        if not self._parts:
            return
        words, parts, kept = self._words, self._parts, self.kept
        self.clear()
        jobs, seconds = (ctypes.c_int64 * len(words))(*words), (ctypes.c_double * len(parts))()
        status = _library().k3_sequence(self.kernels.handle, self.kernels.threads, jobs, len(parts), seconds)
        del kept
        if status:
            raise MemoryError("no memory for the working buffers of the CPU kernels")
        took = seconds[:]
        self.kernels.spent.seconds += sum(took)
        if self.clock is not None:
            self.clock.move(parts, took)


@functools.lru_cache
def bits(number: float) -> int:
    """A double as the integer of its bits."""
    return int(np.float64(number).view(np.int64))


def address(array: NDArray[Any]) -> int:
    """Where an array's first element is."""
    found: int = array.__array_interface__["data"][0]
    return found


@functools.lru_cache(1024)
def _every(experts: int, tokens: int) -> tuple[tuple[NDArray, int], tuple[NDArray, int]]:
    """Where pairs begin when each expert works on every token, and the tokens of the pairs; each with its address."""
    start, token = tokens * np.arange(experts + 1), np.tile(np.arange(tokens), experts)
    return (start, address(start)), (token, address(token))


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, if it describes the jobs as this file does. Raises ResourceError."""
    library = load_library()
    if any(library.k3_job_size(kind) != 8 * len(fields.split()) for kind, fields in FIELDS.items()):
        raise ResourceError(
            "the CPU kernels describe their jobs differently from this package; build them again"
        )
    return library
