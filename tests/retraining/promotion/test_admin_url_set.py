"""A server whose settings get an admin_url while a run awaits a restart of it: the engine is asked from then
on, and what was ordered is not forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from driftguard.errors import Conflict
from driftguard.records.documents.retraining_run import Rollout, Watch
from driftguard.retraining.engines.engine_admin import EngineDraft, EngineRefused
from driftguard.retraining.promotion.draft_rows import put_in_service
from driftguard.retraining.promotion.reconcile import settle
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.retraining.run import retrain
from driftguard.settings import Settings
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun
from tests.retraining.engine_stub import EngineStub, running
from tests.retraining.world import drift, incident_of, incident_states, make_settings, trained

OLD, NEW = "v1", "v2"
SERVER = "engine-1"
WATCH = Watch((), (), 0.05, 400, 0, recovered=False, verdict="worse")


def draft(version: str) -> dict[str, str]:
    return {"name": version, "version": version, "method": "draft_model", "directory": f"/drafts/{version}"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineStub]:
    """Serves NEW; of OLD it knows nothing."""
    with running(EngineStub(tmp_path, tmp_path)) as stub:
        stub.serving = stub.first = draft(NEW)
        stub.loaded = {NEW: stub.serving}
        yield stub


@pytest.fixture
def settings(engine: EngineStub, tmp_path: Path) -> Settings:
    return make_settings(tmp_path / "data", engine.url)


@pytest.fixture
def rolling_back(database: Database) -> RetrainRun:
    """OLD fell, NEW was trained from it and does worse; a restart with OLD was ordered."""
    now = datetime.now(UTC)
    run = trained(database, drift(database, OLD, now), OLD, NEW, f"/drafts/{NEW}", "rolling_back")
    with database.session() as session:
        for version in (OLD, NEW):
            served = EngineDraft(version, version, "draft_model", f"/drafts/{version}")
            put_in_service(session, SERVER, "target", served, now - timedelta(hours=2), former="retired")
        stored = session.get_one(RetrainRun, run.id)
        rollout = Rollout(OLD, now, now + timedelta(hours=1), "it accepts less")
        stored.numbers = replace(retrain_runs.numbers_of(stored), rollout=rollout, watch=WATCH)
    return run


def states(database: Database) -> dict[str, str]:
    with database.session() as session:
        return {draft.version: draft.state for draft in drafts.list_page(session, limit=10)}


def found(database: Database, run: RetrainRun) -> RetrainRun:
    with database.session() as session:
        return session.get_one(RetrainRun, run.id)


def test_a_rollback_by_a_restart_is_done_by_the_engine(
    database: Database, settings: Settings, engine: EngineStub, rolling_back: RetrainRun
) -> None:
    settle(database, settings, SERVER)
    assert (engine.serving["version"], engine.calls) == (OLD, ["load", "activate"])
    assert states(database) == {OLD: "in_service", NEW: "rolled_back"}
    ended = found(database, rolling_back)
    assert (ended.state, ended.reason) == ("rolled_back", "it accepts less; v1 serves again")
    assert rolling_back.incident_id is not None
    assert incident_states(database, rolling_back.incident_id) == ["open", "mitigating", "open"]


def test_a_rollback_that_the_engine_refuses_is_asked_for_again(
    database: Database, settings: Settings, engine: EngineStub, rolling_back: RetrainRun
) -> None:
    engine.refuse = "load"
    with pytest.raises(EngineRefused):
        settle(database, settings, SERVER)
    asked = found(database, rolling_back)
    assert asked.state == "rolling_back"
    assert (asked.reason or "").startswith("it accepts less; draft v1 cannot be put back: ")
    engine.refuse = ""
    settle(database, settings, SERVER)
    assert found(database, rolling_back).state == "rolled_back"


def test_a_draft_that_is_rolled_back_is_not_taken_for_one_that_was_lost(
    database: Database, settings: Settings, engine: EngineStub, rolling_back: RetrainRun
) -> None:
    """The engine was started with the draft before."""
    engine.first = draft(OLD)
    engine.start_again()
    settle(database, settings, SERVER)
    assert (engine.serving["version"], engine.calls) == (OLD, [])
    assert states(database) == {OLD: "in_service", NEW: "rolled_back"}
    assert found(database, rolling_back).state == "rolled_back"


@pytest.mark.parametrize("by", ["retrain", "rollback"])
def test_commands_are_not_kept_waiting_for_a_restart_that_nobody_awaits(
    database: Database, settings: Settings, engine: EngineStub, rolling_back: RetrainRun, by: str
) -> None:
    if by == "retrain":
        assert "is under way" not in retrain(database, settings, force=True).reason
    else:
        with pytest.raises(Conflict, match="draft v1 is in service on engine-1, not v2"):
            roll_back(database, settings, server=SERVER, draft_version=NEW, reason="it loops")
    assert found(database, rolling_back).state == "rolled_back"


@pytest.fixture
def cut_off(database: Database, engine: EngineStub) -> RetrainRun:
    """The job that loaded NEW into a running server was killed before it heard whether that was done."""
    engine.serving = engine.first = draft(OLD)
    engine.loaded = {OLD: engine.serving}
    now = datetime.now(UTC)
    run = trained(database, drift(database, OLD, now), OLD, NEW, f"/drafts/{NEW}", "rolling_out")
    with database.session() as session:
        stored = session.get_one(RetrainRun, run.id)
        rollout = Rollout(NEW, now, now + timedelta(hours=1), live="begun")
        stored.numbers = replace(retrain_runs.numbers_of(stored), rollout=rollout)
    return run


def test_a_live_update_that_was_cut_off_ends_with_what_the_engine_serves(
    database: Database, settings: Settings, engine: EngineStub, cut_off: RetrainRun
) -> None:
    """Nobody can resume the server at the address that is no longer known."""
    settle(database, settings, SERVER)
    ended = found(database, cut_off)
    assert ended.state == "failed"
    assert ended.reason == (
        "loading draft v2 into a running server was cut off, and that server may be paused until somebody "
        "resumes or restarts it; draft v1 is in service"
    )
    assert (engine.calls, states(database)[OLD]) == ([], "in_service")
    assert cut_off.incident_id is not None
    assert incident_of(database, cut_off.incident_id).state == "open"


def test_a_live_update_that_was_cut_off_says_so_while_nobody_answers_at_the_admin_url(
    database: Database, settings: Settings, engine: EngineStub, cut_off: RetrainRun
) -> None:
    engine.mute = True
    with pytest.raises(EngineRefused):
        settle(database, settings, SERVER)
    told = found(database, cut_off)
    assert told.state == "rolling_out"
    assert (told.reason or "").startswith(
        "loading draft v2 into a running server was cut off, and that server may"
    )
    assert "cannot be reached" in (told.reason or "")
