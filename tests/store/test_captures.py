"""Captured token ids: bounded per segment, kept once."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from uuid import UUID

from driftguard.store.captures import (
    CapturedRequest,
    CaptureFilter,
    insert_captures,
    read_captures,
    to_wire,
)
from driftguard.store.database import Database

NOW = datetime.now(UTC)


def capture(number: int, *, segment: str = "code", age_seconds: int = 0) -> CapturedRequest:
    return CapturedRequest(
        record_id=UUID(int=number),
        server="server-1",
        target="target-1",
        draft_version="v1",
        segment=segment,
        captured_at=NOW - timedelta(seconds=age_seconds),
        prompt_token_ids=[1, 2, number],
        output_token_ids=[2**31 - 1],
    )


def insert(database: Database, captured: list[CapturedRequest], *, keep: int = 100) -> int:
    with database.session() as session:
        return insert_captures(session, captured, max_per_segment=keep)


def read(database: Database, wanted: CaptureFilter | None = None) -> list[CapturedRequest]:
    with database.session() as session:
        return [to_wire(row) for row in read_captures(session, wanted or CaptureFilter())]


def test_a_capture_comes_back_as_it_was_and_only_once(database: Database) -> None:
    sent = [capture(number) for number in range(5)]
    assert insert(database, sent) == 5
    assert insert(database, [*sent[3:], capture(5)]) == 1
    assert read(database) == [*sent, capture(5)]


def test_the_newest_of_each_segment_are_kept(database: Database) -> None:
    insert(database, [capture(number, age_seconds=number) for number in range(6)], keep=4)
    insert(database, [capture(10, segment="chat"), capture(11, age_seconds=2)], keep=4)
    assert {item.record_id.int for item in read(database)} == {0, 1, 2, 10, 11}


def test_segments_are_bounded(database: Database) -> None:
    for start in (0, 40):
        insert(database, [capture(start + n, segment=f"tenant-{start + n:02}") for n in range(40)])
    found = Counter(item.segment for item in read(database))
    assert len(found) == 65
    assert found["other"] == 16


def test_filters(database: Database) -> None:
    insert(database, [capture(1), capture(2, segment="chat"), capture(3, age_seconds=3_600)])
    chosen = CaptureFilter("server-1", "target-1", ["code"], NOW - timedelta(minutes=1))
    assert [item.record_id.int for item in read(database, chosen)] == [1]
    assert read(database, CaptureFilter(server="elsewhere")) == []
