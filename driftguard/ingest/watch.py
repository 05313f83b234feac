"""Watches how long senders wait for an answer, on a thread of its own, because the writing thread may
hang."""

from __future__ import annotations

import threading
from typing import Final

import structlog

from driftguard.ingest.queue import IngestQueue

LONGEST_WAIT_SECONDS: Final = 30.0  # twice what a transaction of the ingest may take; /readyz fails beyond it
LOOK_SECONDS: Final = 1.0
_log = structlog.get_logger(__name__)


class IngestWatch:
    """Logs when the oldest batch has waited too long, and when that ends."""

    def __init__(self, queue: IngestQueue, *, longest_wait_seconds: float = LONGEST_WAIT_SECONDS) -> None:
        self._queue = queue
        self._longest_wait_seconds = longest_wait_seconds
        self._is_late = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingest-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        age = self._queue.oldest_unacknowledged_seconds()
        if not self._is_late and age > self._longest_wait_seconds:
            _log.error("ingest_stuck", oldest_unacknowledged_seconds=round(age, 1))
        elif self._is_late and age <= self._longest_wait_seconds:
            _log.info("ingest_moves_again", oldest_unacknowledged_seconds=round(age, 1))
        self._is_late = age > self._longest_wait_seconds

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            self.look()
