"""Since when a server runs an engine in a version: a dated fact for the diagnosis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from driftguard.store import sources
from driftguard.store.database import Database
from driftguard.store.examination_evidence import Moment, engine_change
from driftguard.store.tables import ServerVersion

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


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
        found = engine_change(session, "chat", moment, NOON - timedelta(minutes=30))
        assert (found.in_words if found else None) == words
        assert engine_change(session, "another", moment, NOON) is None


def test_the_first_version_that_is_seen_is_no_change(database: Database) -> None:
    note(database, -4, "0.32.0")
    with database.session() as session:
        assert engine_change(session, "chat", Moment(seq=1, at=NOON, newest=1), NOON) is None
