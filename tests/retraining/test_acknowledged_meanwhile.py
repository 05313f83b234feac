"""Somebody says that they have seen an incident while a draft is trained for it."""

from __future__ import annotations

from datetime import UTC, datetime

from driftguard.cost.best_action import best_of
from driftguard.incidents import remedy
from driftguard.incidents.message import being_done
from driftguard.retraining.ledger import incident_notes
from driftguard.store import incidents, retrain_runs
from driftguard.store.database import Database
from tests.retraining.world import drift, incident_of, trained


def test_an_incident_acknowledged_during_its_retraining_calls_for_no_second_one(database: Database) -> None:
    incident_id = drift(database, "v1", datetime.now(UTC))
    run = trained(database, incident_id, "v1", "v2", "/drafts/v2", "training")
    with database.session() as session:
        incidents.move(session, incident_id, "acknowledged", "looking at it", datetime.now(UTC))

    meanwhile = incident_of(database, incident_id)
    assert being_done(meanwhile) == "a new draft is being trained"
    assert best_of(remedy.of_incident(meanwhile)).sentence.startswith("wait for the new draft")

    with database.session() as session:
        now = retrain_runs.now(session)
        retrain_runs.end(session, run.id, "rejected", "no gain", now)
        incident_notes.end_mitigation(session, incident_id, "no gain", now)

    after = incident_of(database, incident_id)
    assert after.state == "acknowledged"
    assert being_done(after) is None
