"""A lock that is handed over in the order of asking."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """One thread at a time, the one that has waited longest next.

    A thread that asks again at once, as one that runs step after step does, would get a `threading.Lock`
    back each time, and keep the others out for as long as it goes on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = self._ended = 0  # turns

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._changed:
            before = self._asked
            self._asked += 1
            self._changed.wait_for(lambda: self._ended == before)
        try:
            yield
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()
