"""Which draft a scraped server serves, where that was announced: its counters do not tell."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.store.tables import AnnouncedDraft, ServerStart, Source

Effective = Literal["after_restart", "now"]


def announce(session: Session, server: str, version: str, effective: Effective, at: datetime) -> bool:
    """Replaces what was announced before and has not come into effect. False: there is no such source."""
    if session.get(Source, server) is None:
        return False
    started = select(func.max(ServerStart.started_at)).where(ServerStart.server == server).scalar_subquery()
    values = {"version": version, "effective": effective, "announced_at": at, "started_at": started}
    statement = insert(AnnouncedDraft).values(server=server, **values)
    session.execute(statement.on_conflict_do_update(index_elements=["server"], set_=values))
    return True


def withdraw(session: Session, server: str, version: str) -> None:
    """If it has not come into effect."""
    announced = (AnnouncedDraft.server == server, AnnouncedDraft.version == version)
    session.execute(update(AnnouncedDraft).where(*announced).values(version=None))


def lock(session: Session, server: str) -> AnnouncedDraft | None:
    return session.get(AnnouncedDraft, server, with_for_update=True)


def awaited(session: Session) -> dict[str, str]:
    """The versions that have not come into effect, by server."""
    query = select(AnnouncedDraft).where(AnnouncedDraft.version.is_not(None))
    return {row.server: row.version for row in session.scalars(query) if row.version is not None}


def of_now(session: Session) -> frozenset[str]:
    """Servers of which a draft is announced that is served already."""
    query = select(AnnouncedDraft.server).where(
        AnnouncedDraft.effective == "now", AnnouncedDraft.version.is_not(None)
    )
    return frozenset(session.scalars(query))


def take_effect(row: AnnouncedDraft, instead_of: str | None, at: datetime) -> None:
    """The server serves what was announced. `instead_of`: the version in the settings, null if none."""
    row.serving, row.serving_since, row.instead_of, row.version = row.version, at, instead_of, None
