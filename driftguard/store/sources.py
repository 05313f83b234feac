"""The scraped servers as they were found last, one row each: every sidecar on the database shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.adapters.condition import Condition
from driftguard.records import Fidelity
from driftguard.store.tables import Source

LATELY: Final = timedelta(minutes=1)
FORGOTTEN_AFTER: Final = timedelta(days=1)  # a server that nobody scrapes any more


@dataclass(frozen=True, slots=True)
class SourceState:
    """After the newest scrape. `answered_at`: when one could be read last."""

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
    statement = insert(Source)
    names = [column.name for column in Source.__table__.columns if not column.primary_key]
    replacing = statement.on_conflict_do_update(
        index_elements=["server"], set_={name: statement.excluded[name] for name in names}
    )
    # Of the connection: a session would make objects of what is written all the time.
    session.connection().execute(replacing, [asdict(state) for state in states])
    newest = max(state.scraped_at for state in states)
    session.execute(delete(Source).where(Source.scraped_at < newest - FORGOTTEN_AFTER))


def quiet_servers(session: Session, now: datetime) -> set[str]:
    """Servers whose metrics were read just now and that have nothing to tell: no news is no failure."""
    quiet: tuple[Condition, ...] = ("idle", "waiting", "not_speculating")
    rows = session.execute(
        select(Source.server, Source.scraped_at, Source.interval_seconds).where(Source.condition.in_(quiet))
    )
    return {
        server
        for server, scraped_at, interval_seconds in rows
        if now - scraped_at <= max(3 * timedelta(seconds=interval_seconds), LATELY)
    }


def all_sources(session: Session) -> list[Source]:
    return list(session.scalars(select(Source).order_by(Source.server)))
