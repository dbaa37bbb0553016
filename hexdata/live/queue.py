"""The bounded queues between the stages of a live pipeline, and what they do when they are full."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Generic, Literal, TypeVar, get_args

from hexdata.checks import check_choice, check_count
from hexdata.live.hub import Hub, Stopped

__all__ = ["OVERFLOWS", "Overflow", "Queue"]

Item = TypeVar("Item")

Overflow = Literal["block", "drop-new", "keep-newest"]
"""What becomes of an item for which there is no room: its producer waits; it is dropped; or the oldest
item in the queue is."""
OVERFLOWS: Final = get_args(Overflow)


class Queue(Generic[Item]):
    """A queue of at most ``capacity`` items, for any number of producers and consumers.

    An item that says of itself that it ``is_mark`` takes no room, and is never dropped: what waits for such a
    mark would wait for ever. Counts are those of the queue's whole life: ``put`` accepted, ``taken``, and
    ``dropped``.

    Raises:
        ConfigError: the capacity is below 1, or the overflow behaviour unknown.
    """

    def __init__(self, hub: Hub, capacity: int, overflow: Overflow = "block") -> None:
        check_choice("overflow", overflow, OVERFLOWS)
        self.hub = hub
        self.capacity = check_count("capacity", capacity, 1)
        self.overflow = overflow
        self.accepted = 0
        self.taken = 0
        self.dropped = 0
        self.filled = hub.channel()
        """Notified when there is something to take, or will never be."""
        self.emptied = hub.channel()
        """Notified when there is room."""
        self._items: deque[Item] = deque()
        self._marks = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Append an item; where there is no room, do what ``overflow`` says.

        Raises:
            Stopped: the pipeline has stopped.
        """
        self.hub.wait_for(lambda: self.accept(item), channel=self.emptied)

    def take(self, timeout: float | None = None) -> Item | None:
        """Take the oldest item; None after ``timeout`` seconds without one.

        Raises:
            Stopped: the queue is closed and empty, or the pipeline has stopped.
        """
        return self.hub.wait_for(self.pop, timeout, self.filled)

    def close(self) -> None:
        """Say that nothing more comes: what is there can still be taken. Its producers have ended."""
        self.hub.change(self._close)

    def contents(self) -> list[Item]:
        """Return what is in the queue, the oldest first. No worker changes it: the pipeline is paused."""
        return self.hub.change(lambda: list(self._items))

    def restore(self, items: Iterable[Item]) -> None:
        """Put items back that :meth:`contents` gave, whatever the capacity. Nothing has been put yet."""
        for item in items:
            self._append(item)

    def accept(self, item: Item) -> bool | None:
        """Put an item without waiting, under the hub's lock; None where its producer is to wait."""
        if len(self._items) - self._marks >= self.capacity and not _is_mark(item):
            if self.overflow == "block":
                return None
            self.dropped += 1
            if self.overflow == "drop-new":
                return True
            del self._items[next(place for place, other in enumerate(self._items) if not _is_mark(other))]
        self._append(item)
        self.accepted += 1
        self.filled.notify_all()
        return True

    def pop(self) -> Item | None:
        """Take an item without waiting, under the hub's lock; None where its consumer is to wait.

        Raises:
            Stopped: the queue is closed and empty.
        """
        if self._items:
            self.taken += 1
            self.emptied.notify_all()
            item = self._items.popleft()
            self._marks -= _is_mark(item)
            return item
        if self._closed:
            raise Stopped
        return None

    def _append(self, item: Item) -> None:
        self._items.append(item)
        self._marks += _is_mark(item)

    def _close(self) -> None:
        self._closed = True
        self.filled.notify_all()


def _is_mark(item: object) -> bool:
    return getattr(item, "is_mark", False)
