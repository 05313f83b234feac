"""A candidate that passed the gate and comes into service after its run has failed is watched all the same:
it may be worse than the draft before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import update

from driftguard.records.documents.retraining_run import Rollout
from driftguard.retraining.engines.engine_admin import EngineDraft
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.promotion.draft_rows import put_in_service
from driftguard.retraining.promotion.reconcile import settle
from driftguard.settings import Settings
from driftguard.store import announced_drafts, drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun, Stream
from tests.retraining.engine_stub import EngineStub, running
from tests.retraining.restarted import restarted_settings, serves
from tests.retraining.world import drift, incident_of, incident_states, make_settings, trained

OLD, NEW = "v1", "v2"
SERVER = "engine-1"
REFUSED = "the engine did not answer in time"


@pytest.fixture
def failed(database: Database) -> RetrainRun:
    """OLD fell and serves; NEW was trained from it, and was not put into service as far as is known."""
    now = datetime.now(UTC)
    run = trained(database, drift(database, OLD, now), OLD, NEW, f"/drafts/{NEW}", "promoting")
    with database.session() as session:
        served = EngineDraft(OLD, OLD, "draft_model", f"/drafts/{OLD}")
        put_in_service(session, SERVER, "target", served, now, former="retired")
        retrain_runs.end(session, run.id, "failed", REFUSED, now)
    return run


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineStub]:
    with running(EngineStub(tmp_path, tmp_path)) as stub:
        of_new = {"name": NEW, "version": NEW, "method": "draft_model", "directory": f"/drafts/{NEW}"}
        stub.serving, stub.loaded = of_new, {NEW: of_new}
        yield stub


def by_restart(database: Database, tmp_path: Path) -> Settings:
    """Records of NEW come at last, and none of OLD any more."""
    serves(database, NEW)
    with database.session() as session:
        of_old = update(Stream).where(Stream.draft_version == OLD)
        session.execute(of_old.values(traffic_arrived_at=datetime.now(UTC) - timedelta(minutes=6)))
    return restarted_settings(tmp_path / "data", tmp_path, tmp_path, promote_command=["true"])


def found(database: Database, run: RetrainRun) -> RetrainRun:
    with database.session() as session:
        return session.get_one(RetrainRun, run.id)


def states(database: Database) -> dict[str, str]:
    with database.session() as session:
        return {draft.version: draft.state for draft in drafts.list_page(session, limit=10)}


@pytest.mark.parametrize("how", ["by admin_url", "by restart"])
def test_it_is_watched(
    database: Database,
    engine: EngineStub,
    failed: RetrainRun,
    tmp_path: Path,
    how: Literal["by admin_url", "by restart"],
) -> None:
    if how == "by admin_url":
        settings = make_settings(tmp_path / "data", engine.url)
    else:
        settings = by_restart(database, tmp_path)
    settle(database, settings, SERVER)
    assert states(database) == {OLD: "retired", NEW: "in_service"}
    run = found(database, failed)
    assert (run.state, run.ended_at) == ("watching", None)
    assert retrain_runs.watch_of(run).segments
    assert run.reason == f"better; it came into service late, after: {REFUSED}"
    assert run.incident_id is not None
    assert incident_states(database, run.incident_id)[-1] == "mitigating"


def test_its_incident_is_mitigated_although_a_later_attempt_fails(
    database: Database, failed: RetrainRun, tmp_path: Path
) -> None:
    """As of a deployment that takes longer than its records are awaited: the next night's draft is ordered,
    and is not served before the first one comes."""
    settings = by_restart(database, tmp_path)
    assert failed.incident_id is not None
    later = trained(database, failed.incident_id, OLD, "v3", "/drafts/v3", "rolling_out")
    ago = datetime.now(UTC) - timedelta(hours=1)
    with database.session() as session:
        retrain_runs.change_numbers(session, later.id, rollout=Rollout("v3", ago, ago))
    settle(database, settings, SERVER)
    assert (found(database, failed).state, found(database, later).state) == ("watching", "failed")
    incident = incident_of(database, failed.incident_id)
    assert incident.state == "mitigating"
    assert incident.evidence.mitigation is not None
    assert incident.evidence.mitigation.draft_version == NEW


def test_of_an_attempt_that_ended_nothing_is_told_while_a_later_one_goes_on(
    database: Database, failed: RetrainRun
) -> None:
    assert failed.incident_id is not None
    now = datetime.now(UTC)
    trained(database, failed.incident_id, OLD, "v3", "/drafts/v3", "rolling_out")
    with database.session() as session:
        incident_notes.tell_promotion(session, failed.incident_id, NEW, now)
        incident_notes.end_mitigation(session, failed.incident_id, "rolled back", now)
    incident = incident_of(database, failed.incident_id)
    assert (incident.state, incident.evidence.mitigation) == ("mitigating", None)


def test_two_attempts_that_end_at_the_same_moment_leave_no_mitigation(
    database: Database, failed: RetrainRun
) -> None:
    """The detector ends the watch of one while the other is settled, which has read both by then."""
    assert failed.incident_id is not None
    now = datetime.now(UTC)
    one = trained(database, failed.incident_id, OLD, NEW, "/drafts/v2", "promoting")
    other = trained(database, failed.incident_id, OLD, "v3", "/drafts/v3", "promoting")
    with database.session() as settling:
        known = retrain_runs.in_states(settling, SERVER, "target", retrain_runs.RUNNING_STATES)
        assert len(known) == 2
        with database.session() as fold:
            retrain_runs.end(fold, one.id, "promoted", "stands", now)
            incident_notes.end_mitigation(fold, failed.incident_id, "stands", now)
        retrain_runs.end(settling, other.id, "failed", "late", now)
        incident_notes.end_mitigation(settling, failed.incident_id, "late", now)
    assert incident_states(database, failed.incident_id)[-1] != "mitigating"


def test_it_is_rolled_back_where_it_is_worse(
    database: Database, engine: EngineStub, failed: RetrainRun, tmp_path: Path
) -> None:
    settings = make_settings(tmp_path / "data", engine.url)
    settle(database, settings, SERVER)
    with database.session() as session:
        stored = session.get_one(RetrainRun, failed.id)
        numbers = retrain_runs.numbers_of(stored)
        watch = retrain_runs.watch_of(stored)
        stored.numbers = replace(numbers, watch=replace(watch, verdict="worse"))
    settle(database, settings, SERVER)
    assert engine.serving["version"] == OLD
    assert found(database, failed).state == "rolled_back"


@pytest.mark.parametrize("instead_of", ["another draft", "rejected", "rolled back"])
def test_what_somebody_has_chosen_is_not(
    database: Database, engine: EngineStub, failed: RetrainRun, tmp_path: Path, instead_of: str
) -> None:
    """A draft that the gate rejected, that was rolled back, or that took the place of another one than it was
    made from."""
    with database.session() as session:
        if instead_of == "another draft":
            served = EngineDraft("v3", "v3", "draft_model", "/drafts/v3")
            put_in_service(session, SERVER, "target", served, datetime.now(UTC), former="retired")
        else:
            state: Literal["rejected", "rolled_back"] = (
                "rejected" if instead_of == "rejected" else "rolled_back"
            )
            retrain_runs.end(session, failed.id, state, "it was", datetime.now(UTC))
    settle(database, make_settings(tmp_path / "data", engine.url), SERVER)
    assert states(database)[NEW] == "in_service"
    assert found(database, failed).state in ("failed", "rejected", "rolled_back")


def test_a_watch_that_ends_while_another_attempt_is_settled_stays_ended(
    database: Database, failed: RetrainRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settling has read both before the detector ends the watch of the one, and the other one first."""
    settings = by_restart(database, tmp_path)
    settle(database, settings, SERVER)
    assert failed.incident_id is not None
    earlier = trained(database, failed.incident_id, OLD, "v3", "/drafts/v3", "rolling_out")
    ago = datetime.now(UTC) - timedelta(hours=1)
    with database.session() as session:
        retrain_runs.change_numbers(session, earlier.id, rollout=Rollout("v3", ago, ago))
        session.execute(update(RetrainRun).where(RetrainRun.id == earlier.id).values(started_at=ago))
    withdraw = announced_drafts.withdraw

    def stands_meanwhile(*asked: Any, **since: Any) -> None:
        with database.session() as fold:
            retrain_runs.end(fold, failed.id, "promoted", "stands", datetime.now(UTC))
        withdraw(*asked, **since)

    monkeypatch.setattr(announced_drafts, "withdraw", stands_meanwhile)
    settle(database, settings, SERVER)
    assert (found(database, earlier).state, found(database, failed).state) == ("failed", "promoted")
    assert found(database, failed).reason == "stands"
