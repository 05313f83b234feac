"""What the watch over goodput reads of a busy stream, on each supported server."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, select, text

from driftguard.store import goodput_watches
from driftguard.store.database import Database
from driftguard.store.tables import Record, Stream
from tests.pipeline.traffic import Traffic, store


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


def repeat_the_newest(database: Database, times: int) -> None:
    names = [column.name for column in Record.__table__.columns if column.name not in ("record_id", "seq")]
    with database.session() as session:
        session.execute(
            text(
                f"INSERT INTO records (record_id, seq, {', '.join(names)}) "
                f"SELECT gen_random_uuid(), seq + number, {', '.join(names)} FROM generate_series(1, :times) "
                "AS number, (SELECT * FROM records ORDER BY seq DESC LIMIT 1) AS newest"
            ),
            {"times": times},
        )
    with database.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("VACUUM ANALYZE records"))


def pages_of_a_look(database: Database, after: int) -> int:
    """That the last statement of it reads."""
    asked: list[Any] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        asked.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        with database.session() as session:
            (stream,) = session.scalars(select(Stream))
            assert len(goodput_watches.after(session, stream, after)) >= 30
    finally:
        event.remove(database.engine, "before_cursor_execute", note)
    statement, parameters = asked[-1]
    explained = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
    with database.engine.connect() as connection:
        (plan,) = connection.exec_driver_sql(explained, parameters).scalar_one()
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])
