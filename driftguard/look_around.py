"""What follows from the clock and not from a record, on a thread of its own: incidents of drafts that are
gone end, and the gauges show what the database holds, also while no fold succeeds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import structlog

from driftguard import gauges, incident_closing, status
from driftguard.errors import DatabaseUnavailable
from driftguard.fold_watch import FoldWatch
from driftguard.metrics import Metrics
from driftguard.standing import standings
from driftguard.store import detector_states
from driftguard.store.database import Database
from driftguard.store.work import CHECK, CHORE
from driftguard.usual_silence import UsualSilences

LOOK_SECONDS: Final = 5.0  # from the end of a look to the next one, unless something was found before
SHARE: Final = 0.025  # of a core, that looks take where nothing happens
LONGEST_PAUSE_SECONDS: Final = 30.0
LOOP: Final = "look_around"
log = structlog.get_logger(__name__)


class LookAround:
    """`destinations`: to which notifications are sent. `watch`: is shown how far the fold is.
    `usual`: what is known of the usual silences of sources."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        destinations: Sequence[str] = (),
        watch: FoldWatch | None = None,
        usual: UsualSilences | None = None,
    ) -> None:
        self._database = database
        self._metrics = metrics
        self._destinations = tuple(destinations)
        self._watch = watch or FoldWatch()
        self._usual = usual or UsualSilences()
        self._due = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="look around", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the look at hand."""
        self._stopping.set()
        self._due.set()
        if self._thread.is_alive():
            self._thread.join()

    def soon(self) -> None:
        """There is an incident that opened or ended: Prometheus pages by the gauges. Returns at once."""
        self._due.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._due.clear()
            begun = time.monotonic()
            self._attempt()
            # As long as it took, so that looks that follow each other leave time for everything else.
            took = time.monotonic() - begun
            self._stopping.wait(min(took, LOOK_SECONDS))
            self._due.wait(min(max(LOOK_SECONDS, took / SHARE), LONGEST_PAUSE_SECONDS))

    def _attempt(self) -> None:
        try:
            self.look(datetime.now(UTC))
        except DatabaseUnavailable as error:
            self._metrics.database_up.set(0)
            log.warning("the gauges wait for the database", error=str(error))
        except Exception:
            self._metrics.loop_failures.labels(LOOP).inc()
            log.exception("looking around failed and will be tried again")

    def look(self, now: datetime) -> None:
        """Sets the gauges, and resolves incidents of drafts that are gone: the next look shows that.

        Raises DatabaseUnavailable.
        """
        self._show_lag()
        with self._database.session(CHORE) as session:
            every = standings(session, now, usual=self._usual)
            shown = status.describe(session, now, gauges.chosen(every, self._metrics.max_streams))
            gauges.refresh(session, self._metrics, every, shown, self._destinations, now)
        with self._database.session(CHORE) as session:
            incident_closing.close_replaced(session, every, now)

    def _show_lag(self) -> None:
        """First and alone: it must be right above all when something else fails. What cannot be measured is
        not shown as it was."""
        try:
            with self._database.session(CHECK) as session:
                lag = detector_states.lag(session)
        except Exception:
            self._metrics.fold_lag_records.set(math.nan)
            raise
        self._metrics.fold_lag_records.set(lag.records)
        self._watch.seconds_without_fold(lag.position, lag.unread)
