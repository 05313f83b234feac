"""Notifications: one message to one destination about one event of one incident, never two."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, aliased

from driftguard.store.tables import Notification


def announce(
    session: Session,
    incident_id: UUID,
    destinations: Collection[str],
    event: str,
    severity: str,
    at: datetime,
) -> None:
    """One row per destination; what is already there stays as it is."""
    if not destinations:
        return
    same = {"incident_id": incident_id, "event": event, "severity": severity, "created_at": at}
    rows = [{**same, "destination": destination} for destination in destinations]
    session.execute(insert(Notification).values(rows).on_conflict_do_nothing())


def drop_undelivered(session: Session, incident_id: UUID) -> None:
    """Forgets what nobody was told yet of an incident, but for what is being sent: a graver page follows."""
    waiting = select(Notification.id).where(
        Notification.incident_id == incident_id,
        Notification.event == "firing",
        Notification.delivered_at.is_(None),
    )
    session.execute(
        delete(Notification).where(Notification.id.in_(waiting.with_for_update(skip_locked=True)))
    )


def sendable(session: Session, destinations: Collection[str]) -> list[Notification]:
    """Undelivered notifications, oldest first. A resolution waits until the same place took the firing."""
    firing = aliased(Notification)
    unannounced = exists().where(
        firing.incident_id == Notification.incident_id,
        firing.destination == Notification.destination,
        firing.event == "firing",
        firing.delivered_at.is_(None),
    )
    query = (
        select(Notification)
        .where(Notification.delivered_at.is_(None), Notification.destination.in_(destinations))
        .where((Notification.event == "firing") | ~unannounced)
        .order_by(Notification.id)
    )
    return list(session.scalars(query))


def lock(session: Session, notification_id: int) -> Notification | None:
    """The row, locked until the transaction ends; None when it is gone or somebody else is sending it."""
    return session.scalar(
        select(Notification).where(Notification.id == notification_id).with_for_update(skip_locked=True)
    )


def mark(
    session: Session,
    destination: str,
    incident_events: Collection[tuple[UUID, str, str]],
    *,
    at: datetime,
    error: str | None,
) -> None:
    """Records one attempt at these (incident, event, severity); without an error they are delivered."""
    for incident_id, event, severity in incident_events:
        values: dict[str, object] = {"attempts": Notification.attempts + 1, "last_error": error}
        if error is None:
            values["delivered_at"] = at
        session.execute(
            update(Notification)
            .where(
                Notification.incident_id == incident_id,
                Notification.destination == destination,
                Notification.event == event,
                Notification.severity == severity,
                Notification.delivered_at.is_(None),
            )
            .values(values)
        )


def of_incident(session: Session, incident_id: UUID) -> Sequence[Notification]:
    return session.scalars(
        select(Notification).where(Notification.incident_id == incident_id).order_by(Notification.id)
    ).all()


def count_undelivered(session: Session, destinations: Collection[str]) -> int:
    """Of these destinations. A page that is over, and known there to be over, is no longer owed."""
    later = aliased(Notification)
    is_over = exists().where(
        later.incident_id == Notification.incident_id,
        later.destination == Notification.destination,
        later.event == "resolved",
        later.delivered_at.is_not(None),
    )
    query = (
        select(func.count())
        .select_from(Notification)
        .where(Notification.delivered_at.is_(None), Notification.destination.in_(destinations), ~is_over)
    )
    return session.scalar(query) or 0
