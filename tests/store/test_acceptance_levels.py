"""What the requests of a draft accepted, and how they were sampled, where it has had very many."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from driftguard.store import acceptance_levels
from driftguard.store.acceptance_levels import DraftLevel
from driftguard.store.database import Database
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
