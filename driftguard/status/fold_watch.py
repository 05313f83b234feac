"""Has the fold stopped while records wait? Judged by the position in the database, so that a fold by another
sidecar counts too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

STALLED_AFTER_SECONDS: Final = 60.0


class FoldWatch:
    """It may be called at any interval: if the position is the same as in the last call, it has not moved
    between the two, and the same records still wait. `clock`: monotonic seconds."""

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
