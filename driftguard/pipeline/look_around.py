"""What follows from the clock and not from a record, on a thread of its own: incidents of drafts that are
gone end, and the gauges show what the database holds, also while no fold succeeds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog
from sqlalchemy.orm import Session

from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics
from driftguard.status import gather, gauges
from driftguard.status.fold_watch import FoldWatch
from driftguard.status.usual_silence import UsualSilences
from driftguard.status.verdict import Standing, standings
from driftguard.store import folding, incidents, status_queries, streams
from driftguard.store.database import CHECK, CHORE, Database

LOOK_SECONDS: Final = 5.0  # from the end of a look to the next one, unless something was found before
SHARE: Final = 0.025  # of a core, that looks take where nothing happens
LONGEST_PAUSE_SECONDS: Final = 30.0
MOVED_LOG_SECONDS: Final = 600.0  # between two lines that streams were moved back
REPLACED_AFTER: Final = timedelta(minutes=15)  # of silence, while another draft serves in its place
_LEARNING: Final = ("insufficient_data", "relearning")
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
        self._moved_untold_until = 0.0  # monotonic seconds
        self._due = threading.Event()
        self._stopping = threading.Event()
        self._lag_shown_at = -math.inf  # monotonic seconds
        self._threads = [
            threading.Thread(target=self._run, name="look around", daemon=True),
            threading.Thread(target=self._keep_lag, name="fold lag", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads after the look at hand."""
        self._stopping.set()
        self._due.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def soon(self) -> None:
        """There is an incident that opened or ended: Prometheus pages by the gauges. Returns at once."""
        self._due.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._due.clear()
            begun = time.monotonic()
            self._attempt(lambda: self.look(datetime.now(UTC)))
            # As long as it took, so that looks that follow each other leave time for everything else.
            took = time.monotonic() - begun
            self._stopping.wait(min(took, LOOK_SECONDS))
            self._due.wait(min(max(LOOK_SECONDS, took / SHARE), LONGEST_PAUSE_SECONDS))

    def _keep_lag(self) -> None:
        """Where looks are far apart, or one waits for a table that somebody has locked."""
        while not self._stopping.wait(LOOK_SECONDS):
            if time.monotonic() - self._lag_shown_at > 2 * LOOK_SECONDS:
                self._attempt(self._show_lag)

    def _attempt(self, do: Callable[[], None]) -> None:
        try:
            do()
        except DatabaseUnavailable as error:
            self._metrics.database.up.set(0)
            log.warning("the gauges wait for the database", error=str(error))
        except Exception:
            self._metrics.loops.failures.labels(LOOP).inc()
            log.exception("looking around failed and will be tried again")

    def look(self, now: datetime) -> None:
        """Sets the gauges, and resolves incidents of drafts that are gone: the next look shows that.

        Raises DatabaseUnavailable.
        """
        self._show_lag()
        with self._database.session(CHORE) as session:
            every = standings(session, now, usual=self._usual)
            shown = gather.describe(session, now, gauges.chosen(every, self._metrics.max_streams))
            gauges.refresh(session, self._metrics, every, shown, self._destinations, now)
        with self._database.session(CHORE) as session:
            if streams.are_ahead((item.stream for item in every), now) and streams.move_back(session, now):
                self._tell_moved()
            _close_replaced(session, every, now)

    def _tell_moved(self) -> None:
        """Not at every look, as where another sidecar of this database has a clock that is ahead."""
        if time.monotonic() >= self._moved_untold_until:
            self._moved_untold_until = time.monotonic() + MOVED_LOG_SECONDS
            log.warning("streams were heard later than now: the clock was set back")

    def _show_lag(self) -> None:
        """First and alone: it must be right above all when something else fails. What cannot be measured is
        not shown as it was."""
        self._lag_shown_at = time.monotonic()
        try:
            with self._database.session(CHECK) as session:
                lag = folding.lag(session)
        except Exception:
            self._metrics.fold.lag_records.set(math.nan)
            raise
        self._metrics.fold.lag_records.set(lag.records)
        self._watch.seconds_without_fold(lag.position, lag.unread)


def _close_replaced(session: Session, found: Sequence[Standing], now: datetime) -> None:
    """Resolves incidents of drafts that something other than a retraining replaced, say a restart of the
    server with another draft or target: no record of theirs will ever end them. An incident that is
    being mitigated is left to the watch over the promotion, which may still roll back. A fall may go on with
    what took over (driftguard.incidents.target_replaced): until enough is known of that, its incident
    waits."""
    unresolved = status_queries.unresolved_incidents(session)
    awaited = {one.stream_id for one in incidents.awaited_comparisons(session)}
    learning = {
        (item.stream.server, item.stream.target)
        for item in found
        if item.stream.method != "none" and (item.verdict in _LEARNING or item.stream.id in awaited)
    }
    for item in found:
        if item.verdict != "replaced" or now - item.stream.last_seen_at < REPLACED_AFTER:
            continue
        if (item.stream.server, item.target_in_service) in learning:
            continue
        for known in unresolved.get(item.stream.id, {}).values():
            incident = incidents.lock(session, known.id)  # another sidecar, or somebody, may have ended it
            if incident is None or incident.state == "resolved" or incident.is_left_to_retraining:
                continue
            reason = f"{_replaced(item)} is no longer in service"
            incidents.move(session, incident.id, "resolved", reason, now)
            log.info("incident resolved", incident=str(incident.id), reason=reason)


def _replaced(item: Standing) -> str:
    if item.target_in_service != item.stream.target:
        return f"target {item.stream.target}"
    return f"draft {item.stream.draft_version}"
