"""What the watch over goodput reads of a busy stream, on each supported server."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from sqlalchemy import select, text

from driftguard.store import goodput_watches
from driftguard.store.database import Database
from driftguard.store.examination_evidence import LOOK_BACK
from driftguard.store.partitions import ensure_days
from driftguard.store.tables import Record, Stream
from tests.pipeline.traffic import Traffic, store
from tests.store.explained import pages_read

WRITTEN = ("record_id", "seq", "ended_at")


def test_a_look_takes_no_more_of_the_database_where_the_one_before_is_long_ago(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a stream of hundreds of requests a second, or after an outage. Before version 18 PostgreSQL goes
    on behind the upper bound of a comparison of rows, to the end of the stream."""
    monkeypatch.setattr(goodput_watches, "MOST_READ", 60)
    monkeypatch.setattr(goodput_watches, "MOST_SPANNED", 120)
    store(database, Traffic(seed=45).draw(5, {"chat": 0.75}))
    pages = []
    for requests in (20_000, 100_000):
        repeat_the_newest(database, requests)
        pages.append(pages_of_a_look(database, after=5))
    assert pages[1] < 2 * pages[0]


def test_a_look_takes_no_more_where_the_one_before_is_longer_ago_than_it_reads(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after two weeks in which no sidecar ran. Every window before what it reads went through all requests
    up to there."""
    monkeypatch.setattr(goodput_watches, "MOST_READ", 60)
    monkeypatch.setattr(goodput_watches, "MOST_SPANNED", 120)
    store(database, Traffic(seed=45).draw(5, {"chat": 0.75}))
    with database.session() as session:
        (stream,) = session.scalars(select(Stream))
        edge = stream.last_seen_at - LOOK_BACK
        ensure_days(session, {edge.date(), stream.last_seen_at.date()})
    repeat_the_newest(
        database, 20_000, ended_at=max(edge.replace(hour=0, minute=0), edge - timedelta(hours=1))
    )
    repeat_the_newest(database, 20_000, ended_at=stream.last_seen_at)
    assert pages_of_a_look(database, after=5) < 2 * pages_of_a_look(database, after=20_000)


def repeat_the_newest(database: Database, times: int, ended_at: datetime | None = None) -> None:
    names = [column.name for column in Record.__table__.columns if column.name not in WRITTEN]
    with database.session() as session:
        session.execute(
            text(
                f"INSERT INTO records (record_id, seq, ended_at, {', '.join(names)}) "
                "SELECT gen_random_uuid(), seq + number, coalesce(CAST(:ended_at AS timestamptz), ended_at), "
                f"{', '.join(names)} FROM generate_series(1, :times) "
                "AS number, (SELECT * FROM records ORDER BY seq DESC LIMIT 1) AS newest"
            ),
            {"times": times, "ended_at": ended_at},
        )
    with database.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("VACUUM ANALYZE records"))


def pages_of_a_look(database: Database, after: int) -> int:
    with database.session() as session:
        (stream,) = session.scalars(select(Stream))

        def look() -> None:
            assert len(goodput_watches.after(session, stream, after)) >= 30

        return pages_read(database, look)
