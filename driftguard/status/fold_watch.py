"""Has the fold stopped while records wait? Judged by what the database shows, so that what another sidecar
folds counts: the position moves, whoever moves it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

STALLED_AFTER_SECONDS: Final = 60.0


class FoldWatch:
    """What it is shown may be as seldom as it likes: a position that is the same again has not moved between,
    and the records that waited there wait still. `clock`: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._position: Hashable = None  # at which records were first seen waiting
        self._since = 0.0

    def seconds_without_fold(self, position: Hashable, waiting: int) -> float:
        """For how long something has been seen `waiting` at this position; 0 where nothing is. `position`:
        whatever differs after each fold."""
        with self._lock:
            now = self._clock()
            if waiting == 0:
                self._position = None
                return 0.0
            if position != self._position:
                self._position, self._since = position, now
            return now - self._since
