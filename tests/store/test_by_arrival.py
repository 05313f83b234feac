"""What is read of a stream in the order of arrival, on each supported server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from driftguard.store import acceptance_levels, examination_evidence, folding, renamed_segments
from driftguard.store.acceptance_levels import Span
from driftguard.store.database import Database
from driftguard.store.partitions import ensure_days
from driftguard.store.tables import ABOVE_EVERY_SEQ, Record, ServerVersion, Stream
from tests.pipeline.traffic import Traffic, store
from tests.store.explained import pages_read

DAYS, A_DAY = 2, 10_000
_OF_ANOTHER = """
    INSERT INTO records (record_id, seq, ended_at, {names})
    SELECT gen_random_uuid(), seq - day * :a_day - number, ended_at - make_interval(days => day), {names}
    FROM generate_series(1, :days) AS day, generate_series(1, :a_day) AS number,
         (SELECT * FROM records ORDER BY seq LIMIT 1) AS oldest
    """
_ITS_OWN = """
    INSERT INTO records (record_id, seq, ended_at, {names})
    SELECT gen_random_uuid(), seq + number, ended_at, {names}
    FROM generate_series(1, :a_day) AS number, (SELECT * FROM records ORDER BY seq DESC LIMIT 1) AS newest
    """
_INDEXES = "SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = 'ix_records_stream_seq'::regclass"
Read = Callable[[Session, Stream], object]
SEGMENTS, EVER = ("chat",), Span(0, ABOVE_EVERY_SEQ, examination_evidence.BEGINNING)


def version(stream: Stream) -> ServerVersion:
    return ServerVersion(noticed_at=stream.last_seen_at, noticed_seq=ABOVE_EVERY_SEQ)


READS: dict[str, Read] = {
    "kind_of": lambda session, stream: acceptance_levels.kind_of(session, stream.id),
    "newest": lambda session, stream: acceptance_levels.newest(
        session, stream.id, dict.fromkeys(SEGMENTS, 0), [50], by_first=False
    ),
    "newest_k": lambda session, stream: acceptance_levels.newest_k(
        session, stream.id, dict.fromkeys(SEGMENTS, 0), 50
    ),
    "first_at_k": lambda session, stream: acceptance_levels.first_at_k(
        session, stream.id, SEGMENTS[0], 0, 4, 50
    ),
    "k_of_span": lambda session, stream: acceptance_levels.k_of_span(session, stream.id, "chat", EVER),
    "told_k": lambda session, stream: acceptance_levels.told_k(session, stream.id, EVER),
    "has_other_settings": lambda session, stream: acceptance_levels.has_other_settings(
        session, stream.id, "chat", Span(0, 0, EVER.oldest), 50
    ),
    "the newest requests": lambda session, stream: renamed_segments.newest(session, stream.id, 50),
    "_by_its_clock": lambda session, stream: examination_evidence._by_its_clock(
        session, stream.id, version(stream)
    ),
    "read_of_stream": lambda session, stream: folding.read_of_stream(
        session, stream.id, after=-(2**40), up_to=ABOVE_EVERY_SEQ, limit=5
    ),
}


@pytest.fixture(scope="module")
def promoted(module_database_url: str) -> Database:
    """A stream since today, beside another with 20,000 records on the days before. The index of stream and
    seq is one level deeper than that of seqs alone, as it is with some 100,000 records a day: then PostgreSQL
    thinks that the first record is found sooner in the other one."""
    database = Database.open(module_database_url)
    now = datetime.now(UTC)
    for seed, server in enumerate(("another", "promoted")):
        store(database, Traffic(seed, start=now).draw(20, {"chat": 0.7}, server=server))
    written = ("record_id", "seq", "ended_at")
    names = ", ".join(column.name for column in Record.__table__.columns if column.name not in written)
    with database.session() as session:
        ensure_days(session, {(now - timedelta(days=ago)).date() for ago in range(-1, DAYS + 1)})
        session.execute(text(_OF_ANOTHER.format(names=names)), {"days": DAYS, "a_day": A_DAY})
        session.execute(text(_ITS_OWN.format(names=names)), {"a_day": A_DAY})
        for index in session.scalars(text(_INDEXES)).all():
            session.execute(text(f"ALTER INDEX {index} SET (fillfactor = 10)"))
            session.execute(text(f"REINDEX INDEX {index}"))
        session.execute(text("ANALYZE records"))
    return database


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_draft_that_was_just_promoted_is_read_without_the_records_of_others(
    promoted: Database, read: Read
) -> None:
    """Of each day before it has none: PostgreSQL read all that others had then."""
    with promoted.session() as session:
        stream = session.scalars(select(Stream).where(Stream.server == "promoted")).one()
        assert pages_read(promoted, lambda: read(session, stream)) < 200
