"""The examiner: what follows from the fold's findings and reads history, on threads of its own.

One thread compares replaced targets and examines incidents, as soon as the fold has stored them; the other
one tells incidents whose examination takes too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from functools import partial
from typing import Final
from uuid import UUID

import structlog

from driftguard.errors import DatabaseUnavailable
from driftguard.incidents import examination, target_replaced
from driftguard.incidents.severity import NOBODY, Paging
from driftguard.metrics import Metrics
from driftguard.store import incidents
from driftguard.store.database import CHORE, Database, DatabaseTimeout

LOOP: Final = "examination"
POLL_SECONDS: Final = 1.0  # woken or not: other sidecars of this database find drifts too
UNAVAILABLE_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 5.0  # after a failure; doubles up to the longest
LONGEST_PAUSE_SECONDS: Final = 600.0
log = structlog.get_logger(__name__)


class Examiner:
    """`minimum_drop`: of acceptance, below which a replaced target is no incident. `on_told`: called after an
    incident was told."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        *,
        minimum_drop: float,
        paging: Paging = NOBODY,
        on_told: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._metrics = metrics
        self._minimum_drop = minimum_drop
        self._paging = paging
        self._on_told = on_told
        self._pauses: dict[Hashable, tuple[float, float]] = {}  # what failed -> (seconds, until: monotonic)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for name, work in (
                ("examiner", self._examine_now),
                ("overdue incidents", self._announce_overdue_now),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads after what is at hand."""
        self._stopping.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def soon(self) -> None:
        """The fold has stored an incident. Returns at once."""
        self._wake.set()

    def _run(self, work: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                work()
            except DatabaseUnavailable as error:
                log.warning("the examination waits for the database", error=str(error))
                self._stopping.wait(UNAVAILABLE_SECONDS)
            except Exception:
                self._metrics.loops.failures.labels(LOOP).inc()
                log.exception("the examination failed and will be tried again")
                self._stopping.wait(UNAVAILABLE_SECONDS)

    def _examine_now(self) -> None:
        self._wake.clear()
        self.examine(datetime.now(UTC))
        self._wake.wait(POLL_SECONDS)

    def _announce_overdue_now(self) -> None:
        self.announce_overdue(datetime.now(UTC))
        self._stopping.wait(POLL_SECONDS)

    def examine(self, now: datetime) -> None:
        """Everything that waits for it, but for what failed a moment ago. Raises DatabaseUnavailable."""
        with self._database.session(CHORE) as session:
            comparisons = incidents.awaited_comparisons(session)
        for one in comparisons:
            compare = partial(target_replaced.compare, self._database, one, self._minimum_drop, now)
            self._attempt(one.stream_id, compare)
        with self._database.session(CHORE) as session:
            waiting = incidents.to_examine(session)
        for incident_id in waiting:
            self._attempt(incident_id, partial(self._examine, incident_id, now))

    def announce_overdue(self, now: datetime) -> None:
        """Tells incidents that have waited for too long. Raises DatabaseUnavailable."""
        if examination.announce_overdue(self._database, self._paging, now):
            self._on_told()

    def _examine(self, incident_id: UUID, now: datetime) -> None:
        examination.examine(self._database, incident_id, self._paging, now)
        self._on_told()

    def _attempt(self, what: Hashable, work: Callable[[], None]) -> None:
        pause, until = self._pauses.get(what, (FIRST_PAUSE_SECONDS / 2.0, 0.0))
        if time.monotonic() < until:
            return
        try:
            work()
        except Exception as error:
            if isinstance(error, DatabaseUnavailable) and not isinstance(error, DatabaseTimeout):
                raise
            pause = min(2.0 * pause, LONGEST_PAUSE_SECONDS)
            self._pauses[what] = (pause, time.monotonic() + pause)
            self._metrics.loops.failures.labels(LOOP).inc()
            log.exception("an examination failed and will be tried again", what=str(what), seconds=pause)
        else:
            self._pauses.pop(what, None)
