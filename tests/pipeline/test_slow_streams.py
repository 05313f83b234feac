"""A stream whose statements always take too long is held as one that raises; a slow database holds nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics
from driftguard.pipeline import batch_fold, fold_loop, held
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store import database
from driftguard.store import folding as fold_store
from driftguard.store.database import Database
from driftguard.store.folding import is_another_in_time, position
from driftguard.store.tables import HeldStream
from tests.pipeline.test_fold_loop import CONFIG, fold_all
from tests.pipeline.test_held_streams import POISONED, SERVERS, traffic_of
from tests.pipeline.traffic import Traffic, all_summaries, store

SHORT = replace(database.FOLD, statement_seconds=0.5)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fold_loop, batch_fold, fold_store):
        monkeypatch.setattr(module, "FOLD", SHORT)
    monkeypatch.setattr(held, "RETRY_AFTER_SECONDS", (0.0,) * 4)


def let_be_slow(database: Database, servers: Sequence[str]) -> None:
    """Whatever is stored of these streams' states takes longer than the fold waits."""
    names = ", ".join(f"'{server}'" for server in servers)
    with database.session() as session:
        session.execute(
            text(
                "CREATE OR REPLACE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                f"IF EXISTS (SELECT FROM streams WHERE id = NEW.stream_id AND server IN ({names or 'NULL'})) "
                "THEN PERFORM pg_sleep(30); END IF; RETURN NEW; END $$"
            )
        )
        session.execute(
            text(
                "CREATE OR REPLACE TRIGGER slowly BEFORE INSERT OR UPDATE ON detector_states "
                "FOR EACH ROW EXECUTE FUNCTION slowly()"
            )
        )


def all_held(database: Database) -> Sequence[HeldStream]:
    with database.session() as session:
        return session.scalars(select(HeldStream)).all()


def requests(database: Database) -> list[int]:
    with database.session() as session:
        return sorted(each["requests"] for each in all_summaries(session).values())


def test_one_slow_stream_is_set_aside_and_the_others_are_folded(database: Database) -> None:
    traffic = Traffic(seed=75)
    traffic_of(database, traffic, (100, 0.75))
    fold_all(Pipeline(database, CONFIG, Metrics()))
    let_be_slow(database, [POISONED])
    traffic_of(database, traffic, (100, 0.75))
    folding = Pipeline(database, CONFIG, Metrics())
    for _ in range(8):
        folding.fold_batch()
    assert requests(database) == [100, 200, 200, 200]
    (row,) = all_held(database)
    assert row.reason == "TookTooLong: a statement took longer than 0.5 s"
    assert (row.failures, row.records_behind) == (5, 100)
    assert row.set_aside_at is not None

    let_be_slow(database, [])
    with database.session() as session:
        session.execute(text("UPDATE held_streams SET next_try_at = now()"))
    fold_all(folding)
    assert requests(database) == [200, 200, 200, 200]
    assert not all_held(database)


def test_it_is_held_although_all_records_that_come_next_are_its_own(database: Database) -> None:
    traffic = Traffic(seed=76)
    traffic_of(database, traffic, (20, 0.75))
    fold_all(Pipeline(database, CONFIG, Metrics()))
    let_be_slow(database, [POISONED])
    store(database, traffic.draw(100, {"chat": 0.75}, server=POISONED))
    store(database, traffic.draw(30, {"chat": 0.75}, server="alpha"))
    folding = Pipeline(database, CONFIG, Metrics(), batch_records=10)
    for _ in range(30):
        folding.fold_batch()
    assert requests(database) == [20, 20, 20, 50]
    assert len(all_held(database)) == 1


@pytest.mark.parametrize("servers", [SERVERS, (POISONED,)])
def test_where_no_other_stream_can_be_stored_nobody_is_held(
    database: Database, servers: Sequence[str]
) -> None:
    """Too slow for each of them; or for the only one there is."""
    traffic = Traffic(seed=77)
    for server in servers:
        store(database, traffic.draw(10, {"chat": 0.75}, server=server))
    let_be_slow(database, servers)
    folding = Pipeline(database, CONFIG, Metrics())
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable, match=r"cancelled after 0\.5 s"):
            folding.fold_batch()
    assert not all_held(database)
    with database.session() as session:
        assert position(session) == 0
    let_be_slow(database, [])
    fold_all(folding)
    assert requests(database) == [10] * len(servers)


def test_a_database_that_goes_away_while_streams_are_taken_one_by_one_holds_nobody(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = Traffic(seed=78)
    traffic_of(database, traffic, (20, 0.75))
    fold_all(Pipeline(database, CONFIG, Metrics()))
    let_be_slow(database, [POISONED])
    traffic_of(database, traffic, (20, 0.75))
    others = is_another_in_time

    def gone(session: Session, stream_id: int) -> bool:
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        with database.session() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        return others(session, stream_id)

    monkeypatch.setattr(batch_fold, "is_another_in_time", gone)
    with pytest.raises(DatabaseUnavailable):
        Pipeline(database, CONFIG, Metrics()).fold_batch()
    assert not all_held(database)
