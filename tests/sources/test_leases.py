"""Two sidecars with the same source on one database: one has the turn, and what it scraped counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from sqlalchemy import text

from driftguard.errors import DatabaseUnavailable
from driftguard.records import AcceptanceRecord
from driftguard.sources.leases import ScrapeLeases
from driftguard.store import scrape_leases
from driftguard.store.database import Database
from driftguard.store.records import BatchResult
from driftguard.store.scrape_leases import LeaseLocks
from tests.alerting.http_receiver import wait_until
from tests.store.samples import make_records


@dataclass
class Loop:
    """One sidecar's turns with the server `chat`, without the scraping."""

    database: Database
    stored: list[AcceptanceRecord] = field(default_factory=list)
    is_stopped: bool = False

    def __post_init__(self) -> None:
        self.turns = ScrapeLeases(self.database, ["chat"], self._store)

    def look(self) -> None:
        asyncio.run(self.turns.look())

    def stop(self) -> None:
        if not self.is_stopped:
            self.turns.stop()
        self.is_stopped = True

    def _store(self, records: Sequence[AcceptanceRecord]) -> Future[BatchResult]:
        self.stored += records
        done: Future[BatchResult] = Future()
        done.set_result(BatchResult(len(records), 0))
        return done


@pytest.fixture
def first(database: Database) -> Iterator[Loop]:
    loop = Loop(database)
    yield loop
    loop.stop()


@pytest.fixture
def second(database_url: str) -> Iterator[Loop]:
    with closing(Database.open(database_url)) as database:
        loop = Loop(database)
        yield loop
        loop.stop()


def lose_connections(database: Database) -> None:
    """What a restart of the database does to whoever holds a lock; it ends when they are gone."""
    with database.session() as session:
        session.execute(
            text(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_locks "
                "WHERE locktype = 'advisory' AND pid <> pg_backend_pid() "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
        )


def test_one_has_the_turn_and_the_other_takes_over_when_it_stops(first: Loop, second: Loop) -> None:
    first.look()
    second.look()
    turn = first.turns.of("chat")
    assert turn is not None
    assert second.turns.of("chat") is None
    assert (first.turns.waiting, second.turns.waiting) == ((), ("chat",))
    waiting = turn.submit(make_records(3, seed=1))
    first.turns.flush()
    waiting.result(10)
    assert len(first.stored) == 3

    first.stop()
    second.look()
    assert second.turns.of("chat") is not None
    assert second.turns.waiting == ()


def test_what_was_scraped_before_the_lock_was_lost_is_not_stored(first: Loop, second: Loop) -> None:
    """The second may have scraped the same by then."""
    first.look()
    turn = first.turns.of("chat")
    assert turn is not None
    waiting = turn.submit(make_records(3, seed=1))
    lose_connections(second.database)
    second.look()
    assert second.turns.of("chat") is not None

    first.turns.flush()  # before it has noticed
    with pytest.raises(DatabaseUnavailable):
        waiting.result(10)
    first.look()
    assert first.turns.of("chat") is None
    with pytest.raises(DatabaseUnavailable):
        turn.submit(make_records(3, seed=2))
    first.look()
    assert first.turns.waiting == ("chat",)
    second.stop()
    first.look()
    again = first.turns.of("chat")
    assert again is not None
    assert again.id != turn.id  # so the next window begins with a new reading
    assert first.stored == []


def test_a_sidecar_that_is_frozen_holds_its_servers_no_longer_than_it_may(
    first: Loop, second: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape_leases, "FROZEN_AFTER", "1s")
    first.look()  # and never again
    monkeypatch.undo()
    turn = first.turns.of("chat")
    assert turn is not None
    waiting = turn.submit(make_records(3, seed=1))

    def taken_over() -> bool:
        second.look()
        return second.turns.of("chat") is not None

    wait_until(taken_over, "the second to scrape")
    first.turns.flush()
    with pytest.raises(DatabaseUnavailable):
        waiting.result(10)
    assert first.stored == []


def test_a_restart_of_the_database_loses_nothing_if_nobody_else_scraped_meanwhile(
    first: Loop, second: Loop
) -> None:
    first.look()
    turn = first.turns.of("chat")
    lose_connections(second.database)
    first.look()
    assert first.turns.of("chat") is None
    first.look()
    again = first.turns.of("chat")
    assert turn is not None
    assert again is not None
    assert again.id == turn.id  # so the next window begins where the last one ended


def test_a_sidecar_whose_clock_is_days_ahead_forgets_nobody_elses_lease(database: Database) -> None:
    """Else the other one, whose server has not answered yet, would begin that server's windows anew."""
    now, theirs = datetime.now(UTC), uuid4()
    with closing(LeaseLocks(database)) as locks:
        locks.write(["chat"], theirs, "other", now)
        locks.write(["code"], uuid4(), "ahead", now + timedelta(days=2))
        assert locks.last_leases(["chat"]) == {"chat": theirs}
        locks.write(["old"], uuid4(), "other", now - timedelta(days=2))
        locks.write(["chat"], theirs, "other", now)
        assert "old" not in locks.last_leases(["old"])
