"""Since when a server runs an engine in a version: a dated fact for the diagnosis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from driftguard.records import AcceptanceRecord
from driftguard.store import sources
from driftguard.store.database import Database
from driftguard.store.examination_evidence import Moment, engine_change
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import Record, ServerVersion, Stream
from tests.store.samples import make_records

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
CHAT = Stream(id=1, server="chat")  # without records


def note(database: Database, minutes: float, version: str | None, kind: str = "vllm") -> None:
    at = NOON + timedelta(minutes=minutes)
    state = sources.SourceState(
        "chat", kind, "http://chat", "counter", "reporting", "", at, at, at, 15.0, None, version
    )
    with database.session() as session:
        sources.store(session, [state])


def kept(database: Database) -> list[tuple[str, str]]:
    query = select(ServerVersion).order_by(ServerVersion.noticed_at)
    with database.session() as session:
        return [(row.kind, row.version) for row in session.scalars(query)]


def test_a_version_is_kept_once_and_every_change_of_it(database: Database) -> None:
    for minutes, version in enumerate(["0.31.0", "0.31.0", None, "0.32.0", "0.32.0", "0.31.0"]):
        note(database, minutes, version)
    note(database, 9, "0.5.23", kind="sglang")
    assert kept(database) == [
        ("vllm", "0.31.0"),
        ("vllm", "0.32.0"),
        ("vllm", "0.31.0"),
        ("sglang", "0.5.23"),
    ]


@pytest.mark.parametrize(
    ("minutes", "words"),
    [
        (-4, "vLLM 0.31.0 became vLLM 0.32.0 at 11:56 UTC, 4 minutes before the change"),
        (3, "vLLM 0.31.0 became vLLM 0.32.0 at 12:03 UTC, 3 minutes after the change"),  # asked rarely
        (0, "vLLM 0.31.0 became vLLM 0.32.0 at 12:00 UTC, at the time of the change"),
        (-85, "vLLM 0.31.0 became vLLM 0.32.0 at 10:35 UTC, 85 minutes before the change"),
        (-95, None),  # more than an hour before the change can have begun
        (11, None),
    ],
)
def test_a_change_of_the_version_is_told_where_it_is_near_the_change_of_acceptance(
    database: Database, minutes: float, words: str | None
) -> None:
    note(database, -600, "0.31.0")
    note(database, minutes, "0.32.0")
    with database.session() as session:
        moment = Moment(seq=1, at=NOON, newest=1)
        found = engine_change(session, CHAT, moment, NOON - timedelta(minutes=30))
        assert (found.in_words if found else None) == words
        assert engine_change(session, Stream(id=2, server="another"), moment, NOON) is None


def test_versions_are_noticed_on_after_the_clock_was_set_back(database: Database) -> None:
    """One that was noticed by the clock that was ahead counts as noticed now, which is before the next."""
    note(database, -600, "0.31.0")
    note(database, 1440, "0.32.0")
    note(database, -8, "0.32.0")
    assert kept(database) == [("vllm", "0.31.0"), ("vllm", "0.32.0")]
    note(database, -4, "0.33.0")
    note(database, -3, "0.33.0")
    assert kept(database) == [("vllm", "0.31.0"), ("vllm", "0.32.0"), ("vllm", "0.33.0")]
    with database.session() as session:
        assert sources.versions(session, ["chat"])["chat"].version == "0.33.0"
        found = engine_change(session, CHAT, Moment(1, NOON, 1), NOON - timedelta(minutes=30))
    assert found is not None
    assert found.in_words == "vLLM 0.32.0 became vLLM 0.33.0 at 11:56 UTC, 4 minutes before the change"


def test_several_versions_that_a_clock_which_was_ahead_has_noticed_keep_their_order(
    database: Database,
) -> None:
    for minutes, version in ((-600, "0.31.0"), (1440, "0.32.0"), (1450, "0.33.0"), (-4, "0.34.0")):
        note(database, minutes, version)
    assert [version for _, version in kept(database)] == ["0.31.0", "0.32.0", "0.33.0", "0.34.0"]
    with database.session() as session:
        assert sources.versions(session, ["chat"])["chat"].version == "0.34.0"


def test_what_another_sidecar_has_noticed_a_moment_later_stays(database: Database) -> None:
    note(database, -4, "0.31.0")
    note(database, -3.5, "0.32.0")
    note(database, -4, "0.31.0")
    assert [version for _, version in kept(database)] == ["0.31.0", "0.32.0"]


def test_the_first_version_that_is_seen_is_no_change(database: Database) -> None:
    note(database, -4, "0.32.0")
    with database.session() as session:
        assert engine_change(session, CHAT, Moment(seq=1, at=NOON, newest=1), NOON) is None


@pytest.mark.parametrize(
    ("clock", "minutes", "words"),
    [
        (-120, -4, "at 11:56 UTC, 4 minutes before the change"),
        (0, -4, "at 11:56 UTC, 4 minutes before the change"),
        (120, -4, "at 11:56 UTC, 5 minutes before the change"),  # after the record before it
        (-120, 6, "at 12:06 UTC, 6 minutes after the change"),
        (-120, 15, None),
        (-20, -100, None),
        (-120, -120, None),  # the time that the server's clock showed at the change
    ],
)
def test_a_change_of_the_version_is_told_by_the_order_of_arrival_where_the_clock_of_the_server_is_wrong(
    database: Database, clock: int, minutes: int, words: str | None
) -> None:
    note(database, -600, "0.31.0")
    records = {}
    for minute in range(-150, 30):
        if minute == minutes:
            note(database, minutes, "0.32.0")
        at = NOON + timedelta(minutes=minute + clock)
        records[minute] = make_records(1, seed=minute + 200, ended_at=at, server="chat")
        if minute in (minutes - 1, 29):
            _store(database, records)
    with database.session() as session:
        stream = session.scalars(select(Stream)).one()
        at = NOON + timedelta(minutes=clock)
        seq = session.scalars(select(Record.seq).where(Record.ended_at == at)).one()
        found = engine_change(session, stream, Moment(seq, at, seq), at - timedelta(minutes=30))
    assert (found.in_words.partition("0.32.0 ")[2] if found else None) == words


def _store(database: Database, records: dict[int, list[AcceptanceRecord]]) -> None:
    """Together, in this order."""
    with database.session() as session:
        insert_batches(session, list(records.values()), StreamRegistry(), NOON)
    records.clear()
