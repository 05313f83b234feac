"""Alertmanager v2 sink: every page is posted to every peer until it is over and each peer knows.

An alert is re-sent with `endsAt` two minutes ahead while its incident is not resolved, so that it ends by
itself if this process dies. Everything that a restart needs is in the incident (id, opened_at, resolved_at)
and its notification rows: the same incident gives the same labels and the same startsAt, for ever.
Source: Alertmanager's OpenAPI v2, POST /api/v2/alerts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    event: str  # firing | resolved
    body: Mapping[str, Any]


def destinations(peers: Collection[str]) -> list[str]:
    return [PREFIX + peer.rstrip("/") for peer in peers]


def alert(incident: Incident, stream: Stream, external_url: str, now: datetime) -> Alert:
    """The alert of one incident at this moment. Labels and startsAt never change over its life."""
    resolved = incident.state == "resolved"
    ends_at = incident.resolved_at if resolved and incident.resolved_at else now + ENDS_AHEAD
    body = {
        "labels": {
            "alertname": ALERTNAME,
            "server": stream.server,
            "target": stream.target,
            "draft_version": stream.draft_version,
            "method": stream.method,
            "severity": incident.severity,
            "incident": str(incident.id),  # else a resolution, repeated, would end the stream's next incident
        },
        "annotations": {
            "summary": summary(incident, stream),
            "since": incident.change_point_at.isoformat(),
            "segments": ", ".join(segment["segment"] for segment in incident.segments),
            "runbook_url": f"{external_url.rstrip('/')}/runbooks/{ALERTNAME}",
        },
        "startsAt": incident.opened_at.isoformat(),
        "endsAt": ends_at.isoformat(),
        "generatorURL": permalink(external_url, incident.id),
    }
    return Alert(incident.id, "resolved" if resolved else "firing", body)


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
            alerts = self._alerts_for(peer, now)
            if alerts:
                self._record(peer, alerts, now, self._post(peer, alerts))

    def news(self) -> bool:
        """Whether something has not been offered to a peer yet, so that a round should not wait."""
        with self._database.session() as session:
            rows = notifications.sendable(session, destinations(self._peers))
            return any(row.attempts == 0 for row in rows)

    def _alerts_for(self, peer: str, now: datetime) -> list[Alert]:
        destination = PREFIX + peer
        with self._database.session() as session:
            found = incidents.alerting(session, now - REPEAT_RESOLUTION_FOR, destination)
            return [alert(incident, stream, self._external_url, now) for incident, stream in found]

    def _post(self, peer: str, alerts: Sequence[Alert]) -> str | None:
        """None when the peer took them, else what went wrong."""
        try:
            answer = self._client.post(f"{peer}/api/v2/alerts", json=[item.body for item in alerts])
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.is_success else f"HTTP {answer.status_code}: {answer.text[:200]}"

    def _record(self, peer: str, alerts: Sequence[Alert], now: datetime, error: str | None) -> None:
        if error is not None:
            log.warning("alertmanager did not take the alerts", peer=peer, alerts=len(alerts), error=error)
        outcome = "delivered" if error is None else "failed"
        for item in alerts:
            self._metrics.notifications.labels("alertmanager", item.event, outcome).inc()
        with self._database.session() as session:
            for item in alerts:
                # A peer that was configured after the incident opened gets its row now.
                notifications.announce(session, item.incident_id, [PREFIX + peer], item.event, now)
            pairs = [(item.incident_id, item.event) for item in alerts]
            notifications.mark(session, PREFIX + peer, pairs, at=now, error=error)
