"""Signals that end the demo, so that it always ends what it has started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """Raised on the main thread; `number`: of the signal.

    Event loops take other exceptions for errors of the callback that was interrupted, and go on.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stops:
    """The first signal raises Stopped; those after it do not disturb the cleaning up."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._is_held = False
        for number in ENDING:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._number is not None:
            return
        self._number = number
        if not self._is_held:
            raise Stopped(number)

    def end(self) -> None:
        """From now on signals do nothing, as all is being ended anyway. Ignored by the system: a function of
        Python is forgotten before the process is over, and one that came then would change its exit code."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Until the end of the block a signal waits: what is started inside is noted, too. Raises Stopped."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._number is not None:
            raise Stopped(self._number)
