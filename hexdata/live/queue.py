"""Bounded queues between the stages of a live pipeline, with their overflow behaviour."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Generic, Literal, TypeVar, get_args

from hexdata.checks import check_choice, check_count
from hexdata.live.coordinator import Coordinator, Stopped

__all__ = ["OVERFLOWS", "Overflow", "Queue"]

Item = TypeVar("Item")

Overflow = Literal["block", "drop-new", "keep-newest"]
"""Action of a full queue: the producer waits ("block"), the new item is dropped ("drop-new"), or the oldest
item is dropped ("keep-newest")."""
OVERFLOWS: Final = get_args(Overflow)


class Queue(Generic[Item]):
    """Queue of at most ``capacity`` items, for any number of producers and consumers.

    An item whose ``is_marker`` is true does not count towards the capacity and is never dropped, because a
    stage may wait for it. ``accepted``, ``taken`` and ``dropped`` count items over the lifetime of the queue.

    Args:
        coordinator: Coordinator of the pipeline.
        capacity: Maximum number of items, at least 1.
        overflow: Action when the queue is full. Default "block".

    Raises:
        ConfigError: The capacity is below 1, or the overflow behaviour is unknown.
    """

    def __init__(self, coordinator: Coordinator, capacity: int, overflow: Overflow = "block") -> None:
        check_choice("overflow", overflow, OVERFLOWS)
        self.coordinator = coordinator
        self.capacity = check_count("capacity", capacity, 1)
        self.overflow = overflow
        self.accepted = 0
        self.taken = 0
        self.dropped = 0
        self.filled = coordinator.new_condition()
        """Notified when an item is available, or when the queue is closed."""
        self.emptied = coordinator.new_condition()
        """Notified when the queue has space."""
        self._items: deque[Item] = deque()
        self._markers = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Append an item; if the queue is full, act as ``overflow`` states.

        Raises:
            Stopped: The pipeline has stopped.
        """
        self.coordinator.wait_for(lambda: self.accept(item), condition=self.emptied)

    def take(self, timeout: float | None = None) -> Item | None:
        """Remove and return the oldest item; return None after ``timeout`` seconds without one.

        Raises:
            Stopped: The queue is closed and empty, or the pipeline has stopped.
        """
        return self.coordinator.wait_for(self.pop, timeout, self.filled)

    def close(self) -> None:
        """Close the queue: its producers have ended. Consumers can still take the remaining items."""
        self.coordinator.change(self._close)

    def contents(self) -> list[Item]:
        """Return the items in the queue, oldest first. The pipeline must be paused."""
        return self.coordinator.change(lambda: list(self._items))

    def restore(self, items: Iterable[Item]) -> None:
        """Append items that :meth:`contents` returned to an unused queue, even above the capacity."""
        for item in items:
            self._append(item)

    def accept(self, item: Item) -> bool | None:
        """Append an item without waiting; return None if the producer has to wait.

        The caller holds the coordinator's lock.
        """
        if len(self._items) - self._markers >= self.capacity and not _is_marker(item):
            if self.overflow == "block":
                return None
            self.dropped += 1
            if self.overflow == "drop-new":
                return True
            del self._items[next(index for index, other in enumerate(self._items) if not _is_marker(other))]
        self._append(item)
        self.accepted += 1
        self.filled.notify_all()
        return True

    def pop(self) -> Item | None:
        """Remove and return an item without waiting; return None if the consumer has to wait.

        The caller holds the coordinator's lock.

        Raises:
            Stopped: The queue is closed and empty.
        """
        if self._items:
            self.taken += 1
            self.emptied.notify_all()
            item = self._items.popleft()
            self._markers -= _is_marker(item)
            return item
        if self._closed:
            raise Stopped
        return None

    def _append(self, item: Item) -> None:
        self._items.append(item)
        self._markers += _is_marker(item)

    def _close(self) -> None:
        self._closed = True
        self.filled.notify_all()


def _is_marker(item: object) -> bool:
    return getattr(item, "is_marker", False)
