"""Which captured requests are scored, and what is kept of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import select, text

from driftguard.store import acceptance_levels, serving_scores
from driftguard.store.captures import CapturedRequest, insert_captures
from driftguard.store.database import Database
from driftguard.store.records import insert_batches
from driftguard.store.serving_scores import SCORED_REQUESTS
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import Record, Stream
from tests.store.explained import pages_read
from tests.store.samples import make_records

AT = datetime.now(UTC) - timedelta(minutes=5)


def served(database: Database, name: int, seconds: float, *, version: str = "v1", **fixed: Any) -> None:
    """A captured request of german, and its record."""
    at = AT + timedelta(seconds=seconds)
    records = make_records(
        1, seed=name, record_id=UUID(int=name), ended_at=at, draft_version=version, **fixed
    )
    capture = CapturedRequest(
        record_id=UUID(int=name),
        server="server-1",
        target="target-1",
        draft_version=version,
        segment="german",
        captured_at=at,
        prompt_token_ids=[1, 2],
        output_token_ids=list(range(900)),
    )
    with database.session() as session:
        insert_batches(session, [records], StreamRegistry(), datetime.now(UTC))
        insert_captures(session, [capture], max_per_segment=1_000)


NO_POSITIONS: dict[str, Any] = {"drafted_per_position": None, "accepted_per_position": None}


def captured(database: Database, changed: tuple[str, ...] = ("german",)) -> list[tuple[int, bool]]:
    with database.session() as session:
        stream = session.scalars(select(Stream).where(Stream.draft_version == "v1")).one()
        found = serving_scores.captured(session, stream, changed, AT)
    return [(UUID(one.captured.record_id).int, one.is_after) for one in found]


def test_only_what_says_how_it_was_served_by_this_draft_is_scored(database: Database) -> None:
    served(database, 1, -2)
    served(database, 2, 1, temperature=None)
    served(database, 3, 1, num_speculative_tokens=None, **NO_POSITIONS)
    served(database, 4, 1, version="v2")
    served(database, 5, 2, temperature=0.0)
    served(database, 6, -8 * 86_400)
    served(database, 7, 1, acceptance_rule="typical")
    assert captured(database) == [(1, False), (5, True)]
    assert captured(database, ("code",)) == []
    with database.session() as session:
        stream = session.scalars(select(Stream).where(Stream.draft_version == "v1")).one()
        (_, one) = serving_scores.captured(session, stream, ["german"], AT)
    assert (one.temperature, one.num_speculative_tokens) == (0.0, 4)
    assert (one.captured.prompt, one.captured.output) == ((1, 2), tuple(range(900)))
    assert one.captured.drafted is not None


def test_the_newest_of_both_sides_come_first(database: Database) -> None:
    for number in range(SCORED_REQUESTS + 5):
        served(database, 1_000 + number, -200 + number)
    for number in range(3):
        served(database, 2_000 + number, 1 + number)
    found = captured(database)
    assert found[:4] == [(1_104, False), (2_002, True), (1_103, False), (2_001, True)]
    assert sum(not is_after for _, is_after in found) == SCORED_REQUESTS


def test_the_record_of_a_captured_request_is_found_without_those_around_it(database: Database) -> None:
    """Where the database has no statistics of the day yet, two hours of them were read for each."""
    served(database, 1, 0)
    for number in range(2, 21):
        served(database, number, number)
    repeat_the_first(database, 5_000)
    assert len(captured(database)) == 20
    assert pages_read(database, lambda: captured(database)) < 1_000


def repeat_the_first(database: Database, times: int) -> None:
    written = ("record_id", "seq", "ended_at")
    names = ", ".join(column.name for column in Record.__table__.columns if column.name not in written)
    with database.session() as session:
        session.execute(
            text(
                f"INSERT INTO records (record_id, seq, ended_at, {names}) "
                f"SELECT gen_random_uuid(), seq, ended_at + number * interval '10 ms', {names} "
                "FROM records, generate_series(1, :times) AS number WHERE record_id = :first"
            ),
            {"times": times, "first": UUID(int=1)},
        )


def test_where_k_varied_the_counts_per_position_tell_how_long_the_drafts_were(database: Database) -> None:
    varied: dict[str, Any] = {
        "num_speculative_tokens": None,
        "steps": 20,
        "drafted": 30,
        "accepted": 15,
        "emitted": 35,
        "drafted_per_position": [16, 10, 4, 0],
        "accepted_per_position": [9, 5, 1, 0],
    }
    served(database, 1, 1, **varied)
    with database.session() as session:
        stream = session.scalars(select(Stream)).one()
        (one,) = serving_scores.captured(session, stream, ["german"], AT)
    assert (one.num_speculative_tokens, one.drafting_steps) == (None, (0.8, 0.5, 0.2))
    assert (one.captured.drafted, one.captured.accepted) == (16, 9)


def test_what_was_verified_at_once_is_told(database: Database) -> None:
    served(database, 1, 1, verification="block")
    served(database, 2, 2, verification="unknown")
    with database.session() as session:
        stream = session.scalars(select(Stream)).one()
        found = serving_scores.captured(session, stream, ["german"], AT)
    assert {UUID(one.captured.record_id).int: one.verification for one in found} == {1: "block", 2: "token"}


def test_drafts_are_compared_as_most_requests_are_served(database: Database) -> None:
    for number in range(3):
        served(database, number, number, verification="block" if number else "token", temperature=0.5)
    served(database, 9, 9, verification="greedy", temperature=0.0)
    with database.session() as session:
        usual = acceptance_levels.usual_sampling(
            session, server="server-1", target="target-1", version="v1", oldest=AT - timedelta(days=1)
        )
    assert usual == (0.5, "block")


def test_a_change_of_verification_does_not_change_the_usual_temperature(database: Database) -> None:
    """Each rule by itself has fewer requests than greedy ones."""
    for number, (verification, temperature) in enumerate(
        [("token", 0.5)] * 2 + [("greedy", 0.0)] * 4 + [("block", 0.5)] * 3
    ):
        served(database, number, number, verification=verification, temperature=temperature)
    with database.session() as session:
        usual = acceptance_levels.usual_sampling(
            session, server="server-1", target="target-1", version="v1", oldest=AT - timedelta(days=1)
        )
    assert usual == (0.5, "block")
