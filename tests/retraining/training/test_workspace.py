"""Which files of drafts are removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from driftguard.retraining.training.workspace import draft_directory, remove_old_drafts
from driftguard.store.database import Database
from driftguard.store.tables import Draft
from tests.retraining.world import drift, make_settings, trained

NOW = datetime.now(UTC)


@pytest.mark.parametrize(
    ("state", "is_kept"),
    [("rolling_out", True), ("promoting", True), ("evaluating", True), ("failed", False)],
)
def test_a_draft_on_its_way_into_service_keeps_its_files(
    database: Database, tmp_path: Path, state: str, is_kept: bool
) -> None:
    """Also where a clock that was ahead has dated others later: a server is about to start with it."""
    settings = make_settings(tmp_path, "http://127.0.0.1:9", keep_candidates=1)
    incident_id = drift(database, "v1", NOW)
    for version, of_run in (("v2", state), ("v3", "rejected")):
        directory = draft_directory(tmp_path, version)
        directory.mkdir(parents=True)
        trained(database, incident_id, "v1", version, str(directory), of_run)
    with database.session() as session:
        ahead = update(Draft).where(Draft.version == "v3").values(created_at=NOW + timedelta(days=2))
        session.execute(ahead)
    remove_old_drafts(database, settings, "engine-1", "target")
    assert draft_directory(tmp_path, "v2").exists() == is_kept
    assert draft_directory(tmp_path, "v3").exists()
