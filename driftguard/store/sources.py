"""The servers whose metrics are scraped or pushed, as they were found last, one row each: every sidecar on
the database shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import case, delete, func, select, update
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.orm import Session

from driftguard.adapters.condition import Condition
from driftguard.records import Fidelity
from driftguard.store.tables import Source

LATELY: Final = timedelta(minutes=1)
FORGOTTEN_AFTER: Final = timedelta(days=1)  # a server of which nothing is read any more
STALE_INTERVALS: Final = 3


@dataclass(frozen=True, slots=True)
class SourceState:
    """After the newest scrape, or export. `answered_at`: when one could be read last."""

    server: str
    kind: str
    url: str
    fidelity: Fidelity | None
    condition: Condition
    detail: str
    since: datetime  # of the condition
    scraped_at: datetime
    answered_at: datetime | None
    interval_seconds: float


def store(session: Session, states: Sequence[SourceState]) -> None:
    """Replaces the rows of these servers, and removes those that were forgotten."""
    _replace(session, states, {})
    newest = max(state.scraped_at for state in states)
    session.execute(delete(Source).where(Source.scraped_at < newest - FORGOTTEN_AFTER))


def store_pushed(session: Session, states: Sequence[SourceState]) -> None:
    """The same without forgetting. `since` stays while the condition does, and `answered_at` where there is
    no newer one: who takes exports does not know what another sidecar took."""
    given = insert(Source).excluded
    kept = {
        "since": case((Source.condition == given.condition, Source.since), else_=given.since),
        "answered_at": func.coalesce(given.answered_at, Source.answered_at),
    }
    _replace(session, states, kept)


def _replace(session: Session, states: Sequence[SourceState], kept: dict[str, Any]) -> None:
    statement: Insert = insert(Source)
    names = [column.name for column in Source.__table__.columns if not column.primary_key]
    values = {name: statement.excluded[name] for name in names} | kept
    replacing = statement.on_conflict_do_update(index_elements=["server"], set_=values)
    # Of the connection: a session would make objects of what is written all the time.
    session.connection().execute(replacing, [asdict(state) for state in states])


def look_at_pushed(session: Session, url: str, now: datetime) -> list[Source]:
    """The servers with this `url` in place of an address: stale where no export came for three intervals;
    those long forgotten are removed."""
    pushed = Source.url == url
    session.execute(delete(Source).where(pushed, Source.scraped_at < now - FORGOTTEN_AFTER))
    patience = func.greatest(
        func.make_interval(0, 0, 0, 0, 0, 0, STALE_INTERVALS * Source.interval_seconds), LATELY
    )
    silent = (Source.condition != "stale", now - Source.scraped_at > patience)
    session.execute(
        update(Source)
        .where(pushed, *silent)
        .values(condition="stale", detail="its exports have stopped", since=Source.scraped_at)
        .execution_options(synchronize_session=False)
    )
    return list(session.scalars(select(Source).where(pushed)))


def quiet_servers(known: Sequence[Source], now: datetime) -> set[str]:
    """Servers whose metrics were read just now and that have nothing to tell: no news is no failure."""
    quiet: tuple[Condition, ...] = ("idle", "waiting", "not_speculating")
    return {
        source.server
        for source in known
        if source.condition in quiet
        and now - source.scraped_at
        <= max(STALE_INTERVALS * timedelta(seconds=source.interval_seconds), LATELY)
    }


def all_sources(session: Session) -> list[Source]:
    return list(session.scalars(select(Source).order_by(Source.server)))
