from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from driftguard.store import drafts
from driftguard.store.database import Database
from driftguard.store.tables import Draft
from tests.retraining.world import drift, trained

NOW = datetime.now(UTC)


@pytest.mark.parametrize(
    ("method", "goes"),
    [("suffix", True), ("ngram", True), ("hybrid", True), ("draft_model", False), ("eagle3", False)],
)
def test_what_holds_captured_text_goes_when_captures_do(database: Database, method: str, goes: bool) -> None:
    """A trained draft, of whatever kind, is kept as one to return to."""
    trained(database, drift(database, "v1", NOW), "v1", "v2", "/drafts/v2", "rejected")
    with database.session() as session:
        session.execute(update(Draft).values(method=method, created_at=NOW - timedelta(days=8)))
        removable = drafts.removable(session, "engine-1", "target", 5, NOW - timedelta(days=7))
        assert [draft.version for draft in removable] == ["v2"] * goes
