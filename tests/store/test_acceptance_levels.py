"""What the requests of a draft accepted, and how they were sampled, where it has had very many."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from driftguard.store import acceptance_levels, renamed_segments
from driftguard.store.acceptance_levels import DraftLevel, Span
from driftguard.store.database import Database
from driftguard.store.tables import ABOVE_EVERY_SEQ
from tests.pipeline.traffic import Traffic, store

HOURS, AN_HOUR = 6, 50


def test_levels_of_a_busy_draft_are_of_its_newest_hours(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promotion read a week of a server's requests, and was given up where that took over 30 seconds."""
    monkeypatch.setattr(acceptance_levels, "MOST_READ", AN_HOUR + 1)
    first = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=HOURS)
    for number in range(HOURS):
        drawn = Traffic(number, start=first + timedelta(hours=number)).draw(AN_HOUR, {"chat": 0.1 * number})
        store(database, drawn)

    def level(until: datetime | None) -> DraftLevel:
        with database.session() as session:
            (found,) = acceptance_levels.levels(
                session,
                server="chat",
                target="target",
                version="v1",
                oldest=first - timedelta(days=7),
                until=until,
            )
        return found

    now, before = level(None), level(first + timedelta(hours=4))
    assert (now.requests, before.requests) == (2 * AN_HOUR, 2 * AN_HOUR)
    assert now.mean == pytest.approx(0.45, abs=0.05)
    assert before.mean == pytest.approx(0.25, abs=0.05)


def test_k_of_a_rare_segment_is_known_in_a_long_span_of_a_busy_stream(database: Database) -> None:
    start = datetime.now(UTC) - timedelta(hours=1)
    traffic = Traffic(1, start=start)
    rare = traffic.draw(1, {"rare": 0.7})
    store(database, [*rare, *traffic.draw(1_200, {"chat": 0.7})])
    span = Span(0, ABOVE_EVERY_SEQ, start - timedelta(days=1))
    with database.session() as session:
        known = [acceptance_levels.k_of_span(session, 1, name, span) for name in ("rare", "chat")]
    assert known[0] is not None
    assert known[0] == known[1]


def test_a_rare_segment_of_a_busy_stream_is_not_looked_for_in_all_that_is_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 6 million requests a week each look took 2 to 6 seconds, and a stream of 80 a second would have
    been compared with nothing any more. What is before a fall is found however long ago that was."""
    for module in (acceptance_levels, renamed_segments):
        monkeypatch.setattr(module, "MOST_READ", 100)
    start = datetime.now(UTC) - timedelta(hours=1)
    traffic = Traffic(1, start=start)
    rare = traffic.draw(40, {"rare": 0.7})
    store(database, [*rare, *traffic.draw(200, {"chat": 0.7}), *traffic.draw(10, {"rare": 0.7})])
    oldest = start - timedelta(days=1)
    with database.session() as session:
        ever, before = Span(0, ABOVE_EVERY_SEQ, oldest), Span(0, len(rare) + 1, oldest)
        spans = [acceptance_levels.of_span(session, 1, span, by_first=False) for span in (ever, before)]
        now = acceptance_levels.newest(session, 1, {"rare": 0}, [50], by_first=False)
        at_k = acceptance_levels.newest_k(session, 1, {"rare": 0}, 50)
        alike = renamed_segments.likenesses(session, 1, {"chat": ABOVE_EVERY_SEQ, "rare": before.end}, oldest)
    assert [{one.segment: one.requests for one in span} for span in spans] == [
        {"chat": 90, "rare": 10},
        {"rare": 40},
    ]
    assert [one.requests for one in now] == [10]
    assert [one.requests for one in at_k] == [10]
    assert {one.segment: one.requests for one in alike} == {"chat": 90, "rare": 40}
