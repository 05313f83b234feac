"""When servers started, as their metrics told it: from this comes the age of a server at a record."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from driftguard.store import sources
from driftguard.store.database import Database
from driftguard.store.tables import ServerStart

START = datetime(2026, 11, 1, 10, tzinfo=UTC)


def note(database: Database, started_at: datetime | None, server: str = "chat") -> None:
    now = START + timedelta(days=200)
    state = sources.SourceState(
        server, "vllm", "http://chat", "counter", "reporting", "", now, now, now, 15.0, started_at
    )
    with database.session() as session:
        sources.store(session, [state])


def starts(database: Database, server: str = "chat") -> list[datetime]:
    query = (
        select(ServerStart.started_at).where(ServerStart.server == server).order_by(ServerStart.started_at)
    )
    with database.session() as session:
        return list(session.scalars(query))


def test_every_start_is_kept_once_however_often_it_is_scraped(database: Database) -> None:
    later = START + timedelta(hours=3)
    for started_at in (START, START, later, None, later):
        note(database, started_at)
    note(database, START, server="code")
    assert starts(database) == [START, later]
    assert starts(database, "code") == [START]


def test_a_clock_that_is_set_by_seconds_makes_no_restart(database: Database) -> None:
    for seconds in (0, 2, -3, 59):
        note(database, START + timedelta(seconds=seconds))
    assert starts(database) == [START]


def test_one_of_several_processes_that_is_older_makes_no_restart(database: Database) -> None:
    note(database, START + timedelta(hours=1))
    note(database, START)
    assert starts(database) == [START + timedelta(hours=1)]


def test_starts_long_past_are_removed_at_the_next_one(database: Database) -> None:
    note(database, START)
    note(database, START + timedelta(days=101))
    assert starts(database) == [START + timedelta(days=101)]


def test_a_restart_is_kept_after_one_by_a_clock_that_was_ahead(database: Database) -> None:
    """START is 200 days ago in these scrapes."""
    ahead, later = START + timedelta(days=201), START + timedelta(days=199)
    note(database, START + timedelta(days=198))
    note(database, ahead)
    note(database, ahead)
    assert starts(database)[-1] == ahead
    for _ in range(2):
        note(database, later)
    assert starts(database) == [START + timedelta(days=198), later]
