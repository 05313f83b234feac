"""Alertmanager v2 sink: every page is posted to every peer until its incident has ended and each peer has
received that.

An alert is re-sent with `endsAt` two minutes ahead while its incident is not resolved, so that it ends
if this process dies. While the database is away what was open is re-sent all the same, for some minutes: for
an upgrade of the database no page ends and comes anew. Everything that a restart needs is in the incident
(id, resolved_at), the severities in its history and its notification rows: an incident of one severity always
gives the same labels and the same startsAt. The severity is a label, so an incident whose severity is raised
is another alert, and the previous one ends in the same post. When an alert ends is told by the clock of the
peer, which its answers name: by that of a sidecar that is behind, each alert would be over as it arrives.
Source: Alertmanager's OpenAPI v2, POST /api/v2/alerts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import structlog

from driftguard.alerting.destination import identity, shown
from driftguard.alerting.places import Places
from driftguard.alerting.retries import Failure, failure_of, wait_seconds
from driftguard.errors import DatabaseUnavailable
from driftguard.incidents.message import permalink, summary
from driftguard.metrics import Metrics
from driftguard.outgoing.posting import NotAnswered, post
from driftguard.records.documents.incident import names_of
from driftguard.store import incidents, notifications
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Stream

ALERTNAME: Final = "DriftGuardIncident"  # never the name of a Prometheus rule: those fire on their own
RESEND_SECONDS: Final = 30.0
# While the database is away. Less than REPEAT_RESOLUTION_FOR, so that the last word on what another sidecar,
# which has the database, knows to be over is that of that one.
KEPT_SECONDS: Final = 600.0
ENDS_AHEAD: Final = timedelta(minutes=2)
REPEAT_RESOLUTION_FOR: Final = timedelta(minutes=15)
LOOK_SECONDS: Final = 1.0
CLOCKS_DIFFER: Final = timedelta(seconds=30)  # by more than that

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert as posted, and the incident event that a delivery proves."""

    incident_id: UUID
    event: str  # firing | resolved | raised: an alert of a higher severity has replaced it
    severity: str
    body: Mapping[str, Any]


def alerts(
    incident: Incident,
    stream: Stream,
    severities: Sequence[tuple[str, datetime]],
    places: Places,
    labels: Mapping[str, str],
    now: datetime,
    ahead: timedelta,
) -> Iterator[Alert]:
    """The alerts of one incident at this moment: one of its severity, and one of each severity that it had
    recently. `ahead`: of this clock, that of the peer."""
    ends = [since for _, since in severities[1:]]
    for (severity, since), raised_at in zip(severities, [*ends, None], strict=True):
        if severity == "info" or (raised_at is not None and raised_at < now - REPEAT_RESOLUTION_FOR):
            continue
        event = "raised" if raised_at else "resolved" if incident.state == "resolved" else "firing"
        over_at = raised_at or incident.resolved_at
        if over_at is not None and over_at > now:  # by a clock that was ahead: until then it would fire on
            over_at = now - CLOCKS_DIFFER
        # Or have opened it. Alertmanager refuses what ends before it starts.
        starts_at = min(since, (over_at or now) + ahead)
        ends_at = (over_at or now + ENDS_AHEAD) + ahead
        body = _body(incident, stream, severity, places, starts_at, ends_at)
        body["labels"] = {**labels, **body["labels"]}
        yield Alert(incident.id, event, severity, body)


def _body(
    incident: Incident, stream: Stream, severity: str, places: Places, starts_at: datetime, ends_at: datetime
) -> dict[str, Any]:
    return {
        "labels": {
            "alertname": ALERTNAME,
            "server": stream.server,
            "target": stream.target,
            "draft_version": stream.draft_version,
            "method": stream.method,
            "severity": severity,
            "incident": str(incident.id),  # else a repeated resolution would end the stream's next incident
        },
        "annotations": {
            "summary": summary(incident, stream),
            "since": incident.change_point_at.isoformat(),
            "segments": ", ".join(names_of(incident.segments)),
            **places.links(ALERTNAME, incident, stream),
        },
        "startsAt": starts_at.isoformat(),
        "endsAt": ends_at.isoformat(),
        "generatorURL": permalink(places.external_url, incident.id),
    }


class Alertmanager:
    """One peer of a cluster, or a lone Alertmanager. `deliver` is called by one thread, again and again.
    `labels`: that every alert gets beside its own."""

    def __init__(
        self, database: Database, url: str, places: Places, metrics: Metrics, labels: Mapping[str, str] = {}
    ) -> None:
        url = url.rstrip("/")
        self.name = identity("alertmanager", url)
        self._url = f"{url}/api/v2/alerts"
        self._database = database
        self._places = places
        self._labels = labels
        self._metrics = metrics
        self._next_round = 0.0  # monotonic seconds
        self._is_stored = True  # the outcome of the last round; until it is, what was offered still seems new
        self._failures = 0  # in a row
        self._ahead = timedelta()  # of this clock, that of the peer, as it told last
        self._open: Sequence[Alert] = ()  # when the database told last,
        self._told_at = 0.0  # monotonic seconds

    def deliver(self) -> float:
        """Sends a round when it is due, or at once when there is something new. Returns the seconds to
        wait. Raises DatabaseUnavailable."""
        try:
            if time.monotonic() >= self._next_round or (self._is_stored and self.news()):
                self._wait_for_next(self.send(datetime.now(UTC)))
        except DatabaseUnavailable:
            self._keep_open()
            raise
        return LOOK_SECONDS

    def _keep_open(self) -> None:
        """Posts again what was open when the database told last, where that is due and not too long ago."""
        now = time.monotonic()
        if not self._open or now < self._next_round or now - self._told_at > KEPT_SECONDS:
            return
        log.warning(
            "open alerts are kept without the database", peer=shown(self.name), alerts=len(self._open)
        )
        _, failure = self._post_by_its_clock(self._prolonged(), self._prolonged)
        self._count(self._open, failure)
        self._wait_for_next(failure)

    def _prolonged(self) -> list[Alert]:
        ends_at = (datetime.now(UTC) + ENDS_AHEAD + self._ahead).isoformat()
        return [replace(item, body={**item.body, "endsAt": ends_at}) for item in self._open]

    def _wait_for_next(self, failure: Failure | None) -> None:
        self._failures = 0 if failure is None else self._failures + 1
        self._next_round = time.monotonic() + self._wait_seconds(failure)

    def _wait_seconds(self, failure: Failure | None) -> float:
        """Never longer than without a failure: the alerts may have changed by then, and be accepted."""
        if failure is None:
            return RESEND_SECONDS
        return min(wait_seconds(failure, self._failures, random.random()), RESEND_SECONDS)

    def send(self, now: datetime) -> Failure | None:
        """One round: every alert that the peer has to receive now. A failure is logged and counted."""
        sent = self._alerts(now)
        self._open, self._told_at = [item for item in sent if item.event == "firing"], time.monotonic()
        if not sent:
            return None
        self._next_round, self._is_stored = time.monotonic() + RESEND_SECONDS, False
        sent, failure = self._post_by_its_clock(sent, lambda: self._alerts(now))
        self._record(sent, now, failure)
        self._is_stored = True
        return failure

    def news(self) -> bool:
        """Whether something has not been offered yet, so that a round should not wait."""
        with self._database.session() as session:
            return notifications.has_unoffered(session, self.name)

    def _alerts(self, now: datetime) -> list[Alert]:
        with self._database.session() as session:
            found = incidents.alerting(session, now - REPEAT_RESOLUTION_FOR, self.name)
            severities = incidents.severities(session, [incident.id for incident, _ in found])
            return [
                item
                for incident, stream in found
                for item in alerts(
                    incident, stream, severities[incident.id], self._places, self._labels, now, self._ahead
                )
            ]

    def _post_by_its_clock(
        self, sent: list[Alert], anew: Callable[[], list[Alert]]
    ) -> tuple[list[Alert], Failure | None]:
        """What was posted last: made anew where the peer tells with its answer that it has another clock."""
        ahead, failure = self._ahead, self._post(sent)
        if self._ahead != ahead:
            sent = anew()
            failure = self._post(sent)
        return sent, failure

    def _post(self, sent: Sequence[Alert]) -> Failure | None:
        try:
            answer = post(self._url, [item.body for item in sent], {})
        except NotAnswered as error:
            return Failure("away", str(error))
        if answer.is_success and answer.date is not None:
            self._compare_clocks(answer.date - datetime.now(UTC))
        return failure_of(answer)

    def _compare_clocks(self, ahead: timedelta) -> None:
        if abs(ahead - self._ahead) > CLOCKS_DIFFER:
            self._ahead = ahead if abs(ahead) > CLOCKS_DIFFER else timedelta()
            log.warning(
                "alertmanager has another clock",
                peer=shown(self.name),
                ahead_seconds=round(self._ahead.total_seconds()),
            )

    def _count(self, sent: Sequence[Alert], failure: Failure | None) -> None:
        if failure is not None:
            log.warning(
                "alertmanager did not take the alerts",
                peer=shown(self.name),
                alerts=len(sent),
                error=failure.reason,
            )
        outcome = "delivered" if failure is None else "refused" if failure.kind == "refused" else "failed"
        for item in sent:
            self._metrics.notifications.attempts.labels("alertmanager", item.event, outcome).inc()

    def _record(self, sent: Sequence[Alert], now: datetime, failure: Failure | None) -> None:
        error = None if failure is None else failure.reason
        self._count(sent, failure)
        own = [(item.incident_id, item.event, item.severity) for item in sent if item.event != "raised"]
        with self._database.session() as session:
            incidents.announce_offered(session, self.name, own, now)
            notifications.mark(session, self.name, own, at=now, error=error)
