"""Servers whose metrics are pushed, as they are looked at by the clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from driftguard.store import sources
from driftguard.store.database import Database
from driftguard.store.sources import PUSHED, SourceState


def test_exports_that_stopped_while_the_clock_was_ahead_are_told_in_time_and_forgotten(
    database: Database,
) -> None:
    now = datetime.now(UTC)
    ahead = now + timedelta(days=30)
    state = SourceState("chat", "vllm", PUSHED, "counter", "reporting", "", ahead, ahead, ahead, 60.0)

    def looked(at: datetime) -> list[tuple[str, datetime, datetime | None]]:
        with database.session() as session:
            found = sources.look_at_pushed(session, PUSHED, at)
            return [(row.condition, row.scraped_at, row.answered_at) for row in found]

    with database.session() as session:
        sources.store_pushed(session, [state])
    assert looked(now) == [("reporting", now, now)]  # the next export may be under way
    assert looked(now + timedelta(minutes=4)) == [("stale", now, now)]
    assert looked(now + timedelta(days=2)) == []
