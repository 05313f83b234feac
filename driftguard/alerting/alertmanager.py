"""Alertmanager v2 sink: every page is posted to every peer until it is over and each peer knows.

An alert is re-sent with `endsAt` two minutes ahead while its incident is not resolved, so that it ends by
itself if this process dies. Everything that a restart needs is in the incident (id, resolved_at), the
severities in its history and its notification rows: an incident of one severity gives the same labels and the
same startsAt, for ever. The severity is a label, so an incident that becomes graver is another alert, and the
one before it ends in the same post.
Source: Alertmanager's OpenAPI v2, POST /api/v2/alerts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import httpx
import structlog

from driftguard.alerting.message import permalink, summary
from driftguard.metrics import Metrics
from driftguard.store import incidents, notifications
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Stream

ALERTNAME: Final = "DriftGuardIncident"  # never that of a Prometheus rule: those page by themselves
RESEND_SECONDS: Final = 30.0
ENDS_AHEAD: Final = timedelta(minutes=2)
REPEAT_RESOLUTION_FOR: Final = timedelta(minutes=15)
TIMEOUT_SECONDS: Final = 10.0
PREFIX: Final = "alertmanager:"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert as posted, and the incident event that a delivery proves."""

    incident_id: UUID
    event: str  # firing | resolved | raised: one of a graver severity has taken its place
    severity: str
    body: Mapping[str, Any]


def destinations(peers: Collection[str]) -> list[str]:
    return [PREFIX + peer.rstrip("/") for peer in peers]


def alerts(
    incident: Incident,
    stream: Stream,
    severities: Sequence[tuple[str, datetime]],
    external_url: str,
    now: datetime,
) -> Iterator[Alert]:
    """Those of one incident at this moment: its own, and one of each severity that it lately had before."""
    ends = [since for _, since in severities[1:]]
    for (severity, since), raised_at in zip(severities, [*ends, None], strict=True):
        if severity == "info" or (raised_at is not None and raised_at < now - REPEAT_RESOLUTION_FOR):
            continue
        event = "raised" if raised_at else "resolved" if incident.state == "resolved" else "firing"
        ends_at = raised_at or incident.resolved_at or now + ENDS_AHEAD
        body = _body(incident, stream, severity, external_url, since, ends_at)
        yield Alert(incident.id, event, severity, body)


def _body(
    incident: Incident, stream: Stream, severity: str, external_url: str, since: datetime, ends_at: datetime
) -> dict[str, Any]:
    return {
        "labels": {
            "alertname": ALERTNAME,
            "server": stream.server,
            "target": stream.target,
            "draft_version": stream.draft_version,
            "method": stream.method,
            "severity": severity,
            "incident": str(incident.id),  # else a resolution, repeated, would end the stream's next incident
        },
        "annotations": {
            "summary": summary(incident, stream),
            "since": incident.change_point_at.isoformat(),
            "segments": ", ".join(segment["segment"] for segment in incident.segments),
            "runbook_url": f"{external_url.rstrip('/')}/runbooks/{ALERTNAME}",
        },
        "startsAt": since.isoformat(),
        "endsAt": ends_at.isoformat(),
        "generatorURL": permalink(external_url, incident.id),
    }


class AlertmanagerSink:
    """Posts to every peer. `send` does one round; the caller repeats it every RESEND_SECONDS."""

    def __init__(
        self,
        database: Database,
        peers: Sequence[str],
        external_url: str,
        metrics: Metrics,
        client: httpx.Client | None = None,
    ) -> None:
        self._database = database
        self._peers = [peer.rstrip("/") for peer in peers]
        self._external_url = external_url
        self._metrics = metrics
        self._client = client or httpx.Client(timeout=TIMEOUT_SECONDS)

    def send(self, now: datetime) -> None:
        """One round. A peer that fails is logged and counted, and hears it again in the next round."""
        for peer in self._peers:
            sent = self._alerts_for(peer, now)
            if sent:
                self._record(peer, sent, now, self._post(peer, sent))

    def news(self) -> bool:
        """Whether something has not been offered to a peer yet, so that a round should not wait."""
        with self._database.session() as session:
            rows = notifications.sendable(session, destinations(self._peers))
            return any(row.attempts == 0 for row in rows)

    def _alerts_for(self, peer: str, now: datetime) -> list[Alert]:
        destination = PREFIX + peer
        with self._database.session() as session:
            found = incidents.alerting(session, now - REPEAT_RESOLUTION_FOR, destination)
            severities = incidents.severities(session, [incident.id for incident, _ in found])
            return [
                item
                for incident, stream in found
                for item in alerts(incident, stream, severities[incident.id], self._external_url, now)
            ]

    def _post(self, peer: str, sent: Sequence[Alert]) -> str | None:
        """None when the peer took them, else what went wrong."""
        try:
            answer = self._client.post(f"{peer}/api/v2/alerts", json=[item.body for item in sent])
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.is_success else f"HTTP {answer.status_code}: {answer.text[:200]}"

    def _record(self, peer: str, sent: Sequence[Alert], now: datetime, error: str | None) -> None:
        if error is not None:
            log.warning("alertmanager did not take the alerts", peer=peer, alerts=len(sent), error=error)
        outcome = "delivered" if error is None else "failed"
        for item in sent:
            self._metrics.notifications.labels("alertmanager", item.event, outcome).inc()
        own = [(item.incident_id, item.event, item.severity) for item in sent if item.event != "raised"]
        with self._database.session() as session:
            for incident_id, event, severity in own:
                # A peer that was configured after the incident opened gets its row now.
                notifications.announce(session, incident_id, [PREFIX + peer], event, severity, now)
            notifications.mark(session, PREFIX + peer, own, at=now, error=error)
