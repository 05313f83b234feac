"""Which draft a scraped server serves, where that was announced: its counters do not tell. Dated by the clock
of the database: who announces and who scrapes may be on different machines."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final, Literal

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.store.sources import PUSHED
from driftguard.store.tables import AnnouncedDraft, ServerStart, Source

# until_restart: at once, and the draft that it was started with serves again after a restart
Effective = Literal["after_restart", "now", "until_restart"]
_NOW: Final[Any] = func.clock_timestamp()


def announce(session: Session, server: str, version: str, effective: Effective) -> datetime | None:
    """Replaces what was announced before and has not come into effect; returns when. None: there is no such
    server whose metrics are scraped."""
    source = session.get(Source, server)
    if source is None or source.url == PUSHED:
        return None
    started = select(func.max(ServerStart.started_at)).where(ServerStart.server == server).scalar_subquery()
    values: dict[str, Any] = {"version": version, "effective": effective, "started_at": started}
    values["announced_at"] = _NOW
    statement = insert(AnnouncedDraft).values(server=server, **values)
    statement = statement.on_conflict_do_update(index_elements=["server"], set_=values)
    return session.scalar(statement.returning(AnnouncedDraft.announced_at))


def withdraw(session: Session, server: str, version: str, previous: str, since: datetime) -> None:
    """It is not awaited, and `previous` is served. Also where a restart since then brought it into effect:
    what restarted the server has taken it back."""
    row = lock(session, server)
    if row is None:
        return
    if row.version == version:
        row.version = None
    elif row.serving == version and row.serving_since is not None and row.serving_since >= since:
        row.version, row.effective, row.announced_at = previous, "now", _NOW


def lock(session: Session, server: str) -> AnnouncedDraft | None:
    return session.get(AnnouncedDraft, server, with_for_update=True)


def awaited(session: Session) -> dict[str, str]:
    """The versions that a restart is to bring into effect, by server."""
    query = select(AnnouncedDraft).where(AnnouncedDraft.effective == "after_restart")
    return {row.server: row.version for row in session.scalars(query) if row.version is not None}


def at_once(session: Session) -> frozenset[str]:
    """Servers of which a draft is announced that is served already."""
    query = select(AnnouncedDraft.server).where(
        AnnouncedDraft.effective != "after_restart", AnnouncedDraft.version.is_not(None)
    )
    return frozenset(session.scalars(query))


def end_if_outdated(row: AnnouncedDraft, settings: str | None) -> None:
    """What is served by announcement holds while the settings say what they said then: who has changed them
    knows better."""
    if row.serving is not None and row.instead_of != settings:
        row.serving = row.serving_since = row.started_with = None


def restarted(row: AnnouncedDraft) -> None:
    """The draft that was loaded into the running server is gone."""
    if row.started_with is not None:
        row.serving, row.started_with = row.started_with, None


def age(session: Session, row: AnnouncedDraft) -> timedelta:
    """For how long it has been announced."""
    found: timedelta = session.execute(select(_NOW - row.announced_at)).scalar_one()
    return found


def take_effect(row: AnnouncedDraft, settings: str | None) -> None:
    """The server serves what was announced. `settings`: the version there, null if none."""
    is_live = row.effective == "until_restart"
    row.started_with = (row.started_with or row.serving or settings) if is_live else None
    row.serving, row.serving_since, row.instead_of, row.version = row.version, _NOW, settings, None
