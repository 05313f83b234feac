from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from driftguard.records.documents.retraining_run import Watch
from driftguard.retraining.promotion.draft_rows import rollback_version
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import Draft
from tests.retraining.world import drift, trained
from tests.store.explained import pages_read
from tests.store.long_history import SERVERS, populate

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


@pytest.mark.parametrize(
    ("method", "days", "removed"), [("draft_model", 0, {"v2"}), ("suffix", 8, {"v2", "v3"})]
)
def test_the_files_of_the_last_draft_that_was_not_found_worse_are_kept(
    database: Database, method: str, days: int, removed: set[str]
) -> None:
    """A rollback returns to it, however many were found worse since and replaced before they were rolled
    back. Of those a corpus, to which none returns, goes when captures do."""
    incident_id = drift(database, "v0", NOW)
    worse = Watch((), (), 0.05, 400, 0, recovered=False, verdict="worse")
    for parent, version in (("v0", "v1"), ("v1", "v2"), ("v2", "v3"), ("v3", "v4")):
        run = trained(database, incident_id, parent, version, f"/drafts/{version}", "promoted")
        with database.session() as session:
            if version in ("v2", "v3"):
                retrain_runs.change_numbers(session, run.id, watch=worse)
            made = Draft.version == version
            kept = {"method": method, "created_at": NOW - timedelta(days=days)}
            session.execute(update(Draft).where(made).values(state="retired", **kept))
    with database.session() as session:
        session.execute(update(Draft).where(Draft.version == "v4").values(state="in_service"))
        removable = drafts.removable(session, "engine-1", "target", 1, NOW - timedelta(days=7))
        assert {draft.version for draft in removable} == removed


def test_a_draft_that_is_made_again_is_not_what_its_own_rollback_returns_to(database: Database) -> None:
    """As a corpus of the same traffic: v1 was replaced by v2, which was found worse, and replaces it."""
    incident_id = drift(database, "v0", NOW)
    trained(database, incident_id, "v0", "v1", "/drafts/v1", "promoted")
    worse = trained(database, incident_id, "v1", "v2", "/drafts/v2", "promoted")
    with database.session() as session:
        verdict = Watch((), (), 0.05, 400, 0, recovered=False, verdict="worse")
        retrain_runs.change_numbers(session, worse.id, watch=verdict)
    again = trained(database, incident_id, "v2", "v1", "/drafts/v1", "promoted")
    with database.session() as session:
        session.execute(update(Draft).where(Draft.version == "v1").values(state="in_service"))
        assert drafts.rollbacks_in_service(session) == {("engine-1", "target", "v1"): "v0"}
        assert rollback_version(session, session.merge(again)) == "v0"


def test_what_a_rollback_returns_to_is_told_without_the_documents_of_all_earlier_runs(
    database: Database,
) -> None:
    """It is asked every few seconds."""
    populate(database, days=300, kilobytes=3)
    with database.session() as session:
        of_all = pages_read(database, lambda: drafts.rollbacks_in_service(session))
        found = drafts.rollbacks_in_service(session)
    assert found == {(f"server-{number}", "target", "v0"): "v3" for number in range(1, SERVERS + 1)}
    assert of_all < 100
