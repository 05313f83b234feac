"""A promoted draft is taken back by hand: the engine serves the one before, and the tables say so and why."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import pytest

from driftguard.errors import BadInput, Conflict, DatabaseUnavailable
from driftguard.records.documents.retraining_run import Watch
from driftguard.retraining.engines.engine_admin import EngineAdmin, EngineDraft, EngineRefused
from driftguard.retraining.promotion import rollback
from driftguard.retraining.promotion.draft_rows import finish_promotion, put_in_service
from driftguard.retraining.promotion.reconcile import settle
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.retraining.tasks import RetrainingJobs
from driftguard.settings import Settings
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun
from tests.api.ingest_server import is_held_up
from tests.retraining.engine_stub import EngineStub, running
from tests.retraining.world import drift, incident_states, make_settings, trained

OLD, NEW, NEXT = "v1", "v2", "v3"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineStub]:
    """Serves NEW; of OLD it knows nothing any more."""
    with running(EngineStub(tmp_path, tmp_path)) as stub:
        stub.serving = {"name": NEW, "version": NEW, "method": "draft_model", "directory": "/drafts/v2"}
        stub.loaded = {NEW: stub.serving}
        yield stub


@pytest.fixture
def settings(engine: EngineStub, tmp_path: Path) -> Settings:
    return make_settings(tmp_path / "data", engine.url)


def promoted(database: Database, settings: Settings, directory: str | None = "/drafts/v1") -> RetrainRun:
    """OLD fell, NEW was trained from it and is in service and watched."""
    now = datetime.now(UTC)
    incident_id = drift(database, OLD, now)
    before = EngineDraft(OLD, OLD, "draft_model", directory)
    info = EngineAdmin(settings.engines[0].admin_url or "", None).info()
    with database.session() as session:
        put_in_service(session, "engine-1", "target", before, now, former="retired")
    run = trained(database, incident_id, OLD, NEW, "/drafts/v2", "promoting")
    with database.session() as session:
        finish_promotion(session, run, info.draft, now, tolerance=0.05, minimum_drop=0.05)
    return run


def take_back(database: Database, settings: Settings, version: str = NEW) -> str:
    told = roll_back(database, settings, server="engine-1", draft_version=version, reason="it loops")
    return told.version


def states(database: Database) -> dict[str, str]:
    with database.session() as session:
        return {draft.version: draft.state for draft in drafts.list_page(session, limit=10)}


def found(database: Database, run_id: UUID) -> RetrainRun:
    with database.session() as session:
        run = retrain_runs.find(session, run_id)
    assert run is not None
    return run


def assert_rolled_back(database: Database, run: RetrainRun, reason: str) -> None:
    """OLD serves again in the place of NEW, which the run made."""
    assert states(database) == {OLD: "in_service", NEW: "rolled_back"}
    ended = found(database, run.id)
    assert (ended.state, ended.reason) == ("rolled_back", reason)


def test_the_draft_before_is_loaded_and_serves_again(
    database: Database, settings: Settings, engine: EngineStub
) -> None:
    run = promoted(database, settings)
    assert take_back(database, settings) == OLD
    assert (engine.serving["version"], engine.calls) == (OLD, ["load", "activate"])
    assert_rolled_back(database, run, "rolled back to draft v1 by hand: it loops")
    assert run.incident_id is not None
    assert incident_states(database, run.incident_id) == ["open", "mitigating", "open"]


def test_a_rollback_that_was_done_and_not_answered_is_told_as_done(
    database: Database, settings: Settings, engine: EngineStub
) -> None:
    run = promoted(database, settings)
    engine.lose = "activate"
    assert take_back(database, settings) == OLD
    assert_rolled_back(database, run, "rolled back to draft v1 by hand: it loops")


def test_a_promotion_that_stood_keeps_its_ending_and_tells_what_came_after(
    database: Database, settings: Settings, engine: EngineStub
) -> None:
    run = promoted(database, settings)
    with database.session() as session:
        retrain_runs.end(session, run.id, "promoted", "passed", datetime.now(UTC))
    take_back(database, settings)
    ended = found(database, run.id)
    assert (ended.state, ended.reason) == ("promoted", "passed; rolled back to draft v1 by hand: it loops")


@pytest.mark.parametrize("stood", [False, True])
def test_a_rollback_that_is_cut_off_when_the_engine_has_acted_is_told_as_one(
    database: Database,
    settings: Settings,
    engine: EngineStub,
    monkeypatch: pytest.MonkeyPatch,
    stood: bool,
) -> None:
    """By a kill, or by a database that is away at that moment."""
    run = promoted(database, settings)
    if stood:
        with database.session() as session:
            retrain_runs.end(session, run.id, "promoted", "passed", datetime.now(UTC))

    def cut_off(*_: object) -> NoReturn:
        raise DatabaseUnavailable("connection refused")

    monkeypatch.setattr(rollback, "_follow", cut_off)
    with pytest.raises(DatabaseUnavailable):
        take_back(database, settings)
    assert engine.serving["version"] == OLD
    with database.session() as session:
        assert list(RetrainingJobs(database, settings)._unsettled(session)) == ["engine-1"]
    settle(database, settings, "engine-1")
    assert_rolled_back(database, run, "rolled back to draft v1 by hand: it loops; v1 serves again")


def test_a_rollback_that_is_cut_off_before_the_engine_has_acted_is_done_all_the_same(
    database: Database, settings: Settings, engine: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = promoted(database, settings)

    def killed(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(EngineAdmin, "activate", killed)
        with pytest.raises(KeyboardInterrupt):
            take_back(database, settings)
    assert (engine.serving["version"], found(database, run.id).state) == (NEW, "rolling_back")
    settle(database, settings, "engine-1")
    assert engine.serving["version"] == OLD
    assert states(database) == {OLD: "in_service", NEW: "rolled_back"}
    ended = found(database, run.id)
    assert ended.state == "rolled_back"
    assert ended.reason is not None
    assert "by hand: it loops" in ended.reason


def test_a_rollback_after_which_the_engine_falls_silent_is_told_as_one_once_it_answers(
    database: Database, settings: Settings, engine: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where putting a draft into service keeps it busy for longer than its answer is waited for."""
    run = promoted(database, settings)
    activate = engine.activate

    def silent_afterwards(version: str) -> dict[str, Any]:
        engine.mute = True
        return activate(version)

    monkeypatch.setattr(engine, "activate", silent_afterwards)
    engine.lose = "activate"
    with pytest.raises(EngineRefused, match=r"cannot be reached.*may have acted"):
        take_back(database, settings)
    asked = found(database, run.id)
    assert (asked.state, asked.reason) == ("rolling_back", "rolled back to draft v1 by hand: it loops")
    engine.mute = False
    settle(database, settings, "engine-1")
    assert_rolled_back(database, run, "rolled back to draft v1 by hand: it loops; v1 serves again")


def test_asked_twice_it_is_done_once(database: Database, settings: Settings, engine: EngineStub) -> None:
    promoted(database, settings)
    take_back(database, settings)
    with pytest.raises(Conflict, match="draft v1 is in service on engine-1, not v2"):
        take_back(database, settings)
    with pytest.raises(Conflict, match="draft v1 was not promoted here"):
        take_back(database, settings, OLD)
    assert engine.serving["version"] == OLD


def test_what_cannot_be_taken_back_is_said_and_stays(
    database: Database, settings: Settings, engine: EngineStub
) -> None:
    promoted(database, settings, directory=None)
    with pytest.raises(Conflict, match="the files of draft v1 are gone"):
        take_back(database, settings)
    with retrain_runs.try_lock(database, "engine-1", "target"), pytest.raises(Conflict, match="is running"):
        take_back(database, settings)
    with pytest.raises(BadInput, match="'other' is not among the engines"):
        roll_back(database, settings, server="other", draft_version=NEW, reason="x")
    assert engine.calls == []
    assert states(database) == {OLD: "retired", NEW: "in_service"}


def test_another_server_at_the_address_is_left_alone(
    database: Database, settings: Settings, engine: EngineStub
) -> None:
    """Two servers may serve the same draft, and change their addresses."""
    promoted(database, settings)
    engines = [one.model_copy(update={"server": "engine-2"}) for one in settings.engines]
    other = settings.model_copy(update={"engines": engines})
    with pytest.raises(EngineRefused, match="calls itself 'engine-1', the settings call it 'engine-2'"):
        roll_back(database, other, server="engine-2", draft_version=NEW, reason="it loops")
    with pytest.raises(EngineRefused, match="calls itself 'engine-1'"):
        settle(database, other, "engine-2")
    assert engine.calls == []
    assert states(database) == {OLD: "retired", NEW: "in_service"}


def test_an_engine_that_refuses_leaves_everything_as_it_was(
    database: Database, settings: Settings, engine: EngineStub
) -> None:
    run = promoted(database, settings)
    engine.refuse = "activate"
    with pytest.raises(EngineRefused, match="out of memory"):
        take_back(database, settings)
    assert states(database) == {OLD: "retired", NEW: "in_service"}
    after = found(database, run.id)
    assert (after.state, after.ended_at, retrain_runs.numbers_of(after).rollout) == ("watching", None, None)


def found_worse(database: Database, run: RetrainRun) -> None:
    """By the watch, and not rolled back yet."""
    worse = Watch((), (), 0.05, 400, 0, recovered=False, verdict="worse")
    with database.session() as session:
        retrain_runs.change_numbers(session, run.id, watch=worse)


def replaced(database: Database, settings: Settings, engine: EngineStub, run: RetrainRun) -> RetrainRun:
    """NEW was found worse while the next draft was being trained from it, which is promoted and watched."""
    found_worse(database, run)
    assert run.incident_id is not None
    after = trained(database, run.incident_id, NEW, NEXT, "/drafts/v3", "promoting")
    engine.serving = {"name": NEXT, "version": NEXT, "method": "draft_model", "directory": "/drafts/v3"}
    engine.loaded = {NEXT: engine.serving}
    settle(database, settings, "engine-1")
    assert [found(database, each.id).state for each in (run, after)] == ["promoted", "watching"]
    return after


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_draft_that_was_itself_found_worse_is_not_returned_to(
    database: Database, settings: Settings, engine: EngineStub, by_hand: bool
) -> None:
    after = replaced(database, settings, engine, promoted(database, settings))
    if by_hand:
        assert take_back(database, settings, NEXT) == OLD
    else:
        found_worse(database, after)
        settle(database, settings, "engine-1")
    assert engine.serving["version"] == OLD
    assert states(database) == {OLD: "in_service", NEW: "retired", NEXT: "rolled_back"}
    ended = found(database, after.id)
    assert ended.state == "rolled_back"
    assert ended.reason is not None
    assert "v1 serves again" in ended.reason or ended.reason.startswith("rolled back to draft v1 by hand")


def test_a_watch_that_ends_as_a_rollback_by_hand_is_asked_for_stays_ended_where_it_is_refused(
    database: Database, settings: Settings, engine: EngineStub
) -> None:
    run = promoted(database, settings)
    engine.refuse = "activate"
    with ThreadPoolExecutor(1) as threads:
        with database.session() as session:  # of the fold, which has found that the promotion stands
            retrain_runs.end(session, run.id, "promoted", "stands", datetime.now(UTC))
            asked = threads.submit(take_back, database, settings)
            while not is_held_up(database) and not asked.done():
                pass
        with pytest.raises(EngineRefused, match="out of memory"):
            asked.result()
    after = found(database, run.id)
    assert (after.state, after.reason, after.ended_at is None) == ("promoted", "stands", False)
