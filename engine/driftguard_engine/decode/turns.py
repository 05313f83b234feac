"""A lock that is handed over in the order of asking."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """One thread at a time, the one that has waited longest next.

    A thread that asks again at once, as one that runs step after step does, would get a `threading.Lock`
    back each time, and keep the others out for as long as it goes on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[object] = deque()  # the first one has its turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        own = object()
        with self._changed:
            self._asked.append(own)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._asked[0] is own)
            yield
        finally:
            with self._changed:
                self._asked.remove(own)
                self._changed.notify_all()
