"""Finished requests that wait to become records, several at a time.

The code that makes records is long, compared with the code that passes bytes on. If it runs for several
requests in a row, it stays in the processor's caches; if it runs after each request, it must be fetched again
each time, which costs more than running it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

AT_ONCE: Final = 16  # takes less than a millisecond, during which traffic waits
LATEST_SECONDS: Final = 0.05


class Backlog(Generic[Item]):
    """Hands each item to `settle`, which must not raise, in order: when there are enough, or after
    LATEST_SECONDS."""

    def __init__(self, settle: Callable[[Item], None]) -> None:
        self._settle = settle
        self._items: list[Item] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Item) -> None:
        self._items.append(item)
        if len(self._items) >= AT_ONCE:
            self.drain()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LATEST_SECONDS, self.drain)

    def drain(self) -> None:
        """All, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._items = self._items, []
        for item in items:
            self._settle(item)
