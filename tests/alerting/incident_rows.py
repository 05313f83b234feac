"""An incident in the database, as the detector loop would have stored it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from sqlalchemy.orm import Session

from driftguard.detection import Acceptance
from driftguard.incident_lifecycle import Severity
from driftguard.incidents import opening as incident_severity
from driftguard.incidents.opening import Paging
from driftguard.records.documents.incident import ChangedSegment, IncidentEvidence
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Stream


def add_stream(database: Database, draft_version: str = "v1") -> int:
    now = datetime.now(UTC)
    with database.session() as session:
        stream = Stream(
            server="chat",
            target="target",
            draft="draft",
            draft_version=draft_version,
            method="draft_model",
            first_seen_at=now,
            last_seen_at=now,
        )
        session.add(stream)
        session.flush()
        return stream.id


def add_incident(
    database: Database,
    destinations: Sequence[str],
    *,
    stream_id: int | None = None,
    severity: str = "critical",
    opened_at: datetime | None = None,
    by_detector: bool = True,
) -> UUID:
    stream_id = stream_id or add_stream(database)
    now = opened_at or datetime.now(UTC)
    before, after = Acceptance(0.74, 0.72, 0.76, 400), Acceptance(0.58, 0.56, 0.6, 400)
    incident = Incident(
        id=uuid4(),
        stream_id=stream_id,
        direction="down",
        severity=severity,
        opened_at=now,
        opened_seq=500,
        change_point_seq=440,
        change_point_at=now - timedelta(minutes=5),
        interval_start_at=now - timedelta(minutes=6),
        interval_end_at=now - timedelta(minutes=4),
        acceptance_before=0.74,
        acceptance_after=0.58,
        tokens_per_second_before=52.0,
        tokens_per_second_after=40.0,
        segments=(ChangedSegment("german", before, after, evidence=1e6),),
        evidence=IncidentEvidence(
            slowdown_measured=0.23,
            slowdown_formula=0.21,
            false_alarm_every=100_000.0 if by_detector else None,
        ),
    )
    with database.session() as session:
        incidents.open_incident(session, incident, "acceptance fell from 0.74 to 0.58")
        incidents.announce(session, incident.id, destinations, "firing", severity, now)
    return incident.id


def raise_to(database: Database, incident_id: UUID, severity: Severity, destinations: Sequence[str]) -> None:
    with database.session() as session:
        grow(session, incidents.find(session, incident_id)[0], severity, destinations)


def grow(session: Session, incident: Incident, severity: Severity, destinations: Sequence[str]) -> None:
    paging = Paging(tuple(destinations))
    assert incident_severity.raise_to(session, incident, severity, "it grew", paging, datetime.now(UTC))


def resolve(database: Database, incident_id: UUID) -> None:
    with database.session() as session:
        incidents.move(session, incident_id, "resolved", "acceptance is back", datetime.now(UTC))
