"""Notifications: one message to one destination about one event of one incident, never two.

Who sends one holds a lease on it, not a lock: no transaction is open while a receiver makes up its mind.
Leases and waits go by the clock of the database, the only one that all sidecars share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import ColumnElement, Delete, delete, exists, func, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from driftguard.store.tables import Notification

LONGEST_LEASE: Final = timedelta(minutes=5)
LONGEST_WAIT: Final = timedelta(hours=1)


def drop_undelivered(session: Session, incident_id: UUID) -> None:
    """Forgets what nobody was told yet of an incident, but for what is being sent: a graver page follows."""
    waiting = select(Notification.id).where(
        Notification.incident_id == incident_id,
        Notification.event == "firing",
        Notification.delivered_at.is_(None),
        _is_free(),
    )
    session.execute(
        delete(Notification).where(Notification.id.in_(waiting.with_for_update(skip_locked=True)))
    )


def _is_free() -> ColumnElement[bool]:
    """Nobody sends it: there is no lease, or it is over."""
    return _is_over(Notification.leased_until, LONGEST_LEASE)


def _is_over(until: InstrumentedAttribute[datetime | None], longest: timedelta) -> ColumnElement[bool]:
    """Also where it would last longer than any does: the database's clock was set back meanwhile."""
    return or_(until.is_(None), until <= func.now(), until > func.now() + longest)


def claim(session: Session, destination: str, lease: timedelta) -> Notification | None:
    """The oldest that is due at this destination, leased to the caller for LONGEST_LEASE at most; None when
    none is.

    A resolution waits until the same place took the firing. A firing that was not taken before a graver one
    followed is forgotten.
    """
    session.execute(_drop_superseded(destination))
    query = (
        select(Notification)
        .where(Notification.destination == destination, Notification.delivered_at.is_(None))
        .where(_is_over(Notification.next_attempt_at, LONGEST_WAIT))
        .where(_is_free(), (Notification.event == "firing") | ~_awaits_firing())
        .order_by(Notification.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    found = session.scalar(query)
    if found is not None:
        found.attempts += 1
        session.execute(
            update(Notification)
            .where(Notification.id == found.id)
            .values(leased_until=func.now() + lease)
            .execution_options(synchronize_session=False)
        )
    return found


def _awaits_firing() -> ColumnElement[bool]:
    firing = aliased(Notification)
    return exists().where(
        firing.incident_id == Notification.incident_id,
        firing.destination == Notification.destination,
        firing.event == "firing",
        firing.delivered_at.is_(None),
    )


def _drop_superseded(destination: str) -> Delete:
    later = aliased(Notification)
    followed = exists().where(
        later.incident_id == Notification.incident_id,
        later.destination == Notification.destination,
        later.event == "firing",
        later.id > Notification.id,
    )
    waiting = select(Notification.id).where(
        Notification.destination == destination,
        Notification.event == "firing",
        Notification.delivered_at.is_(None),
        _is_free(),
        followed,
    )
    return delete(Notification).where(Notification.id.in_(waiting.with_for_update(skip_locked=True)))


def settle_delivered(session: Session, notification_id: int) -> None:
    """Whoever else claimed it meanwhile: it has been taken."""
    session.execute(
        update(Notification)
        .where(Notification.id == notification_id, Notification.delivered_at.is_(None))
        .values(delivered_at=func.now(), leased_until=None, next_attempt_at=None, last_error=None)
    )


def settle_failed(session: Session, notification_id: int, attempt: int, error: str, wait: timedelta) -> None:
    """Ends the lease that was claimed as this attempt, if it is still held, and has it tried after `wait`,
    LONGEST_WAIT at most."""
    session.execute(
        update(Notification)
        .where(
            Notification.id == notification_id,
            Notification.attempts == attempt,
            Notification.delivered_at.is_(None),
        )
        .values(last_error=error, leased_until=None, next_attempt_at=func.now() + wait)
    )


def has_unoffered(session: Session, destination: str) -> bool:
    """Whether something waits here that has not been offered once.

    The firing of an incident whose resolution was offered is never sent.
    """
    resolution = aliased(Notification)
    is_over = exists().where(
        resolution.incident_id == Notification.incident_id,
        resolution.destination == Notification.destination,
        resolution.event == "resolved",
        resolution.attempts > 0,
    )
    waits = exists().where(
        Notification.destination == destination,
        Notification.delivered_at.is_(None),
        Notification.attempts == 0,
        ((Notification.event == "firing") & ~is_over)
        | ((Notification.event != "firing") & ~_awaits_firing()),
    )
    return session.scalar(select(waits)) or False


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
