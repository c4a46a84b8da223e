"""Whose turn it is: a queue that serves clients in turn, each client's requests in order.

Owns the order and the limit. Knows nothing of requests; its caller holds the lock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out within a client; between clients one each in turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # the client that is next comes first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, client: str, item: T) -> None:
        self._waiting.setdefault(client, deque()).append(item)

    def take(self) -> T:
        """The next item; its client goes to the end of the line. Raises KeyError if nothing waits."""
        client, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[client] = items
        return item

    def remove(self, item: T) -> bool:
        """Take an item out of turn; says whether it was waiting."""
        for client, items in self._waiting.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._waiting[client]
                return True
        return False

    def ahead(self, item: T) -> int:
        """How many items come before this one."""
        for place, items in enumerate(self._waiting.values()):
            if item in items:
                turn = items.index(item)
                return (
                    sum(
                        min(len(others), turn + (other < place))
                        for other, others in enumerate(self._waiting.values())
                        if others is not items
                    )
                    + turn
                )
        return 0
