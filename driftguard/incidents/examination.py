"""The examination of a new incident: what its change costs and why it came, hence how grave it is.

The fold stores what the detector found and nothing else, because what an examination reads may be millions of
records. It happens right after that commit, in transactions of its own; then the incident is told, once, with
its cause. Whoever dies in between leaves an incident that still awaits it. An examination that fails or takes
longer than PATIENCE delays no page: the incident is told without its cause, as grave as it is by formula, and
examined later.

The examiner does it on threads of its own. One compares replaced targets and examines incidents, as soon as
the fold has stored them; the other one tells incidents whose examination takes too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.cost import Cost
from driftguard.errors import DatabaseUnavailable
from driftguard.incidents import cost_measurement, diagnosing, opening, target_replaced
from driftguard.incidents.opening import NOBODY, Paging
from driftguard.metrics import Metrics
from driftguard.records.documents.incident import names_of
from driftguard.store import examination_evidence, incidents
from driftguard.store.database import CHECK, CHORE, EXAMINATION, Database, is_outage
from driftguard.store.tables import AwaitedComparison, Incident, Stream

PATIENCE: Final = timedelta(seconds=15)  # from the opening of an incident to its page without a cause
LOOP: Final = "examination"
COMPARED_AGAIN_SECONDS: Final = 60.0  # where it is too early to compare a stream with the one before
POLL_SECONDS: Final = 1.0  # woken or not: other sidecars of this database find drifts too
UNAVAILABLE_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 5.0  # after a failure; doubles up to the longest
LONGEST_PAUSE_SECONDS: Final = 600.0
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Change:
    """What the records around a change point say; `interval`: when its first and its last record ended.

    `drafted_per_step`: draft tokens per step in the changed segments. None where no record tells.
    """

    interval: tuple[datetime, datetime]
    cost: Cost | None
    drafted_per_step: float | None


def examine(
    database: Database,
    incident_id: UUID,
    paging: Paging,
    now: datetime,
) -> None:
    """Reads, then stores and tells in a short transaction of its own: the fold waits for what that locks.

    Raises DatabaseUnavailable, and whatever an examination raises.
    """
    with database.session(EXAMINATION) as session:
        incident, stream = incidents.find(session, incident_id)
        change = _read(session, incident, stream) if incident.evidence.is_of_alarm else None
        diagnosis = diagnosing.diagnosed(session, incident, stream, now)
    with database.session(CHORE) as session:
        examined = incidents.lock(session, incident_id)
        if examined is None or examined.diagnosis is not None:
            return  # another sidecar was faster
        if change is not None:
            _complete(examined, change)
        examined.diagnosis = diagnosis
        _announce(session, examined, paging, now)


def announce_overdue(database: Database, metrics: Metrics, paging: Paging, now: datetime) -> int:
    """Tells the incidents that have waited for PATIENCE, by what the detector found and what that costs by
    formula: a page without a cause is as grave as that, so that it need not be told again. How many."""
    with database.session(CHORE) as session:
        waiting = incidents.awaiting_for(session, PATIENCE, now)
    if not waiting:
        return 0
    drafted = _drafted_per_step(database, metrics, waiting)
    with database.session(CHORE) as session:  # short: the fold waits for what it locks
        waiting = incidents.awaiting_for(session, PATIENCE, now, locked=True)
        for incident in waiting:
            if (known := drafted.get(incident.id)) is not None:
                _cost_by_formula(incident, known)
            opening.announce_examined(session, incident, paging, now)
            log.error("incident told unexamined", incident=str(incident.id), severity=incident.severity)
    return len(waiting)


def _drafted_per_step(
    database: Database, metrics: Metrics, waiting: Sequence[Incident]
) -> dict[UUID, float | None]:
    """Of the changed segments of the incidents whose cost is not known, as far as that is known soon: a
    failure is logged and counted, and delays no page. Raises DatabaseUnavailable."""
    found: dict[UUID, float | None] = {}
    try:
        with database.session(CHECK) as session:
            for one in waiting:
                if one.evidence.slowdown is None and one.evidence.is_of_alarm:
                    found[one.id] = examination_evidence.usual_k(
                        session, one.stream_id, one.change_point_at, names_of(one.segments)
                    )
    except Exception as error:
        if is_outage(error):
            raise
        metrics.loops.failures.labels(LOOP).inc()
        log.exception("what overdue incidents cost is not known", incidents=len(waiting) - len(found))
    return found


def _cost_by_formula(incident: Incident, drafted_per_step: float) -> None:
    incident.evidence = replace(
        incident.evidence,
        slowdown_formula=opening.by_formula(incident, drafted_per_step),
        num_speculative_tokens=drafted_per_step,
    )


def _announce(session: Session, incident: Incident, paging: Paging, now: datetime) -> None:
    if incident.awaits_examination:
        opening.announce_examined(session, incident, paging, now)
    else:
        why = incident.diagnosis.summary if incident.diagnosis else None
        known = opening.severity_of(incident, incident.evidence.slowdown, paging)
        opening.raise_to(session, incident, known, f"examined late: {why}", paging, now)
    log.warning(
        "incident examined", incident=str(incident.id), stream=incident.stream_id, severity=incident.severity
    )


def _read(session: Session, incident: Incident, stream: Stream) -> _Change | None:
    """None of an incident that tells its cost already, or is of a version that did not keep the interval."""
    ends = incident.evidence.interval
    if ends is None or incident.evidence.cost is not None:
        return None
    times = examination_evidence.ended_at(session, stream.id, {*ends, incident.opened_seq})
    change = cost_measurement.Change(
        incident.change_point_seq, incident.change_point_at, incident.opened_seq, names_of(incident.segments)
    )
    newest = times.get(incident.opened_seq, incident.opened_at)
    cost, drafted = cost_measurement.at_change(session, stream, change, newest)
    first, last = (times.get(end, incident.change_point_at) for end in ends)
    return _Change((first, last), cost, drafted)


def _complete(incident: Incident, change: _Change) -> None:
    cost, drafted = change.cost, change.drafted_per_step
    incident.interval_start_at, incident.interval_end_at = change.interval
    incident.tokens_per_second_before = cost.before.tokens_per_second if cost and cost.before else None
    incident.tokens_per_second_after = cost.now.tokens_per_second if cost else None
    if drafted is not None:
        _cost_by_formula(incident, drafted)
    incident.evidence = cost_measurement.with_cost(incident.evidence, cost)


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
        self._compared_again: dict[tuple[int, int], float] = {}  # (stream, seq) -> not until: monotonic
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
        """Everything that waits for it, but for what failed a moment ago, or was too early. Incidents come
        before each comparison: a fleet's may be hundreds at once. Raises DatabaseUnavailable."""
        with self._database.session(CHORE) as session:
            comparisons = incidents.awaited_comparisons(session)
        known = self._compared_again
        self._compared_again = {
            key: known[key] for one in comparisons if (key := (one.stream_id, one.ready_seq)) in known
        }
        for one in comparisons:
            if self._compared_again.get((one.stream_id, one.ready_seq), 0.0) <= time.monotonic():
                self._examine_incidents(now)
                self._attempt(one.stream_id, partial(self._compare, one, now))
        self._examine_incidents(now)

    def _examine_incidents(self, now: datetime) -> None:
        with self._database.session(CHORE) as session:
            waiting = incidents.to_examine(session)
        for incident_id in waiting:
            self._attempt(incident_id, partial(self._examine, incident_id, now))

    def _compare(self, one: AwaitedComparison, now: datetime) -> None:
        if not target_replaced.compare(self._database, one, self._minimum_drop, now):
            again = time.monotonic() + COMPARED_AGAIN_SECONDS
            self._compared_again[one.stream_id, one.ready_seq] = again

    def announce_overdue(self, now: datetime) -> None:
        """Tells incidents that have waited for too long. Raises DatabaseUnavailable."""
        if announce_overdue(self._database, self._metrics, self._paging, now):
            self._on_told()

    def _examine(self, incident_id: UUID, now: datetime) -> None:
        examine(self._database, incident_id, self._paging, now)
        self._on_told()

    def _attempt(self, what: Hashable, work: Callable[[], None]) -> None:
        pause, until = self._pauses.get(what, (FIRST_PAUSE_SECONDS / 2.0, 0.0))
        if time.monotonic() < until:
            return
        try:
            work()
        except Exception as error:
            if is_outage(error):
                raise
            pause = min(2.0 * pause, LONGEST_PAUSE_SECONDS)
            self._pauses[what] = (pause, time.monotonic() + pause)
            self._metrics.loops.failures.labels(LOOP).inc()
            log.exception("an examination failed and will be tried again", what=str(what), seconds=pause)
        else:
            self._pauses.pop(what, None)
