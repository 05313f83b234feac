"""An engine that was started again without its state has lost the draft that was promoted."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import update
from structlog.testing import capture_logs

from driftguard.records.documents.retraining_run import Watch
from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.retraining.promotion.reconcile import settle
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.retraining.run import retrain
from driftguard.store import incidents, retrain_runs
from driftguard.store.tables import Draft, RetrainRun
from tests.retraining.conftest import Drifted
from tests.retraining.engine_stub import EngineStub
from tests.retraining.promotion.test_watch_hook import CANDIDATE, promoted, states, the_run
from tests.retraining.world import incident_of, make_settings

__all__ = ["promoted"]


def promoted_an_hour_ago(drifted: Drifted) -> str:
    """A minute more, as the bound is an hour. Returns the directory of the draft."""
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1, minutes=1)
    with drifted.database.session() as session:
        session.execute(update(Draft).where(Draft.version == CANDIDATE).values(promoted_at=an_hour_ago))
        return str(session.query(Draft.directory).where(Draft.version == CANDIDATE).scalar())


def set_numbers(drifted: Drifted, run_id: UUID, **numbers: Any) -> None:
    with drifted.database.session() as session:
        run = session.get_one(RetrainRun, run_id)
        run.numbers = replace(retrain_runs.numbers_of(run), **numbers)


def found_worse(drifted: Drifted, run_id: UUID) -> None:
    """By the watch, and not rolled back yet."""
    worse = Watch((), (), 0.05, 400, 0, recovered=False, verdict="worse")
    set_numbers(drifted, run_id, watch=worse)


def start_again(drifted: Drifted, engine: EngineStub) -> None:
    """Without what it kept, and the sidecar looks at it."""
    engine.start_again()
    settle(drifted.database, drifted.settings, "engine-1")


def test_the_promoted_draft_serves_again_and_is_watched_on(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    promoted_an_hour_ago(drifted)
    engine.start_again()
    with capture_logs() as logs:
        settle(drifted.database, drifted.settings, "engine-1")
    assert (engine.serving["version"], engine.calls) == (CANDIDATE, ["load", "activate"])
    assert states(drifted) == {drifted.parent: "retired", CANDIDATE: "in_service"}
    run = the_run(drifted, promoted)
    assert run.state == "watching"
    assert "the engine was started again and lost it" in (run.reason or "")
    assert "it was put back" in (run.reason or "")
    assert "promoted draft lost and put back" in [line["event"] for line in logs]
    assert incident_of(drifted.database, drifted.incident_id).state == "mitigating"


def test_files_that_only_the_engine_sees_are_verified_by_it_alone(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    """As where the nightly job runs on another machine than the sidecar."""
    promoted_an_hour_ago(drifted)
    set_numbers(drifted, promoted, checksums_sha256="0" * 64)
    start_again(drifted, engine)
    assert engine.serving["version"] == CANDIDATE


def test_the_nightly_job_puts_it_back_too(drifted: Drifted, promoted: UUID, engine: EngineStub) -> None:
    promoted_an_hour_ago(drifted)
    engine.start_again()
    assert retrain(drifted.database, drifted.settings, trigger="nightly").state == "nothing_to_do"
    assert engine.serving["version"] == CANDIDATE


def test_one_whose_promotion_stands_is_put_back_too_and_its_run_tells(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    promoted_an_hour_ago(drifted)
    with drifted.database.session() as session:
        retrain_runs.end(session, promoted, "promoted", "it stands", datetime.now(UTC))
    start_again(drifted, engine)
    assert engine.serving["version"] == CANDIDATE
    run = the_run(drifted, promoted)
    assert (run.state, (run.reason or "").split(", found at")[0]) == (
        "promoted",
        "it stands; the engine was started again and lost it",
    )


def test_what_somebody_put_into_service_stays(drifted: Drifted, promoted: UUID, engine: EngineStub) -> None:
    """By the admin API, or as the engine's own state says."""
    promoted_an_hour_ago(drifted)
    engine.start_again()
    engine.activate(drifted.parent)
    settle(drifted.database, drifted.settings, "engine-1")
    assert engine.serving["version"] == drifted.parent
    assert states(drifted) == {drifted.parent: "in_service", CANDIDATE: "retired"}


def test_the_run_of_a_draft_that_stood_tells_what_somebody_put_in_its_place(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    """So does that of one that was loaded live, and that a restart of its server lost."""
    with drifted.database.session() as session:
        retrain_runs.end(session, promoted, "promoted", "it stands", datetime.now(UTC))
    engine.start_again()
    engine.activate(drifted.parent)
    with capture_logs() as logs:
        settle(drifted.database, drifted.settings, "engine-1")
        settle(drifted.database, drifted.settings, "engine-1")
    (told,) = [line for line in logs if line["event"] == "promoted draft replaced"]
    assert (told["log_level"], told["draft"]) == ("warning", CANDIDATE)
    reason = the_run(drifted, promoted).reason or ""
    assert reason.startswith(f"it stands; draft {drifted.parent} was found in its place at ")
    assert reason.count("in its place") == 1


def test_another_draft_that_the_engine_is_started_with_stays(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    promoted_an_hour_ago(drifted)
    engine.first = {**engine.first, "version": "of-the-operator"}
    start_again(drifted, engine)
    assert engine.serving["version"] == "of-the-operator"
    assert states(drifted)["of-the-operator"] == "in_service"


def test_one_that_was_rolled_back_is_not_put_back(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    promoted_an_hour_ago(drifted)
    roll_back(
        drifted.database, drifted.settings, server="engine-1", draft_version=CANDIDATE, reason="it loops"
    )
    start_again(drifted, engine)
    assert engine.serving["version"] == drifted.parent
    assert states(drifted)[CANDIDATE] == "rolled_back"


def test_one_that_the_watch_found_worse_is_rolled_back_and_not_put_back(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    promoted_an_hour_ago(drifted)
    found_worse(drifted, promoted)
    start_again(drifted, engine)
    assert engine.serving["version"] == drifted.parent
    assert (states(drifted)[CANDIDATE], the_run(drifted, promoted).state) == ("rolled_back", "rolled_back")


def test_one_that_may_have_ended_its_engine_is_not_put_back_and_that_is_told(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    """It would end it again, and again."""
    promoted_an_hour_ago(drifted)
    start_again(drifted, engine)
    start_again(drifted, engine)
    assert engine.serving["version"] == drifted.parent
    assert states(drifted) == {drifted.parent: "in_service", CANDIDATE: "lost"}
    run = the_run(drifted, promoted)
    assert run.state == "promoted"
    assert (run.reason or "").endswith(
        f"draft {drifted.parent} serves, and it was not put back: the engine ended within 5 minutes of "
        "getting it, so that it may be what ended it"
    )
    assert incident_of(drifted.database, drifted.incident_id).state == "open"


@pytest.mark.parametrize("why", ["refused", "changed", "gone"])
def test_one_that_cannot_be_put_back_is_told_and_the_engine_followed(
    drifted: Drifted, promoted: UUID, engine: EngineStub, why: str
) -> None:
    directory = Path(promoted_an_hour_ago(drifted))
    engine.start_again()
    told = "its files are gone"
    if why == "refused":
        engine.refuse, told = "load", "out of memory"
    elif why == "changed":
        directory.mkdir(parents=True)
        (directory / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
        (directory / "model.safetensors").write_text("other weights")
        told = "is not as the training wrote it"
    else:
        with drifted.database.session() as session:
            session.execute(update(Draft).where(Draft.version == CANDIDATE).values(directory=None))
    with capture_logs() as logs:
        settle(drifted.database, drifted.settings, "engine-1")
    assert states(drifted) == {drifted.parent: "in_service", CANDIDATE: "lost"}
    assert told in (the_run(drifted, promoted).reason or "")
    (line,) = [line for line in logs if line["event"] == "promoted draft lost"]
    assert line["log_level"] == "error"


@pytest.mark.parametrize("instead", ["itself", "another"])
def test_one_that_is_lost_is_called_so_until_it_or_another_is_put_into_service(
    drifted: Drifted, promoted: UUID, engine: EngineStub, instead: str
) -> None:
    promoted_an_hour_ago(drifted)
    engine.refuse = "load"
    start_again(drifted, engine)
    engine.refuse = ""
    for _ in range(2):
        assert states(drifted) == {drifted.parent: "in_service", CANDIDATE: "lost"}
        settle(drifted.database, drifted.settings, "engine-1")
    version = CANDIDATE if instead == "itself" else "by-hand"
    engine.loaded[version] = {**engine.serving, "version": version}
    engine.activate(version)
    settle(drifted.database, drifted.settings, "engine-1")
    assert states(drifted) == {drifted.parent: "retired", CANDIDATE: "retired", version: "in_service"}


def away(engine: EngineStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the draft, answers nothing, and then nothing at all."""
    engine.lose = "load"
    told = engine.info()
    monkeypatch.setattr(engine, "info", lambda: {} if engine.calls else told)


def test_an_engine_that_cannot_be_reached_meanwhile_is_asked_again(
    drifted: Drifted, promoted: UUID, engine: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted_an_hour_ago(drifted)
    engine.start_again()
    with monkeypatch.context() as patched:
        away(engine, patched)
        with pytest.raises(EngineRefused):
            settle(drifted.database, drifted.settings, "engine-1")
    assert states(drifted) == {drifted.parent: "retired", CANDIDATE: "in_service"}
    engine.lose = ""
    told = engine.info

    def told_late() -> dict[str, Any]:
        """How long it runs is then told of a moment before."""
        answer = told()
        time.sleep(0.5)
        return answer

    monkeypatch.setattr(engine, "info", told_late)
    settle(drifted.database, drifted.settings, "engine-1")
    assert engine.serving["version"] == CANDIDATE


def test_one_whose_loading_ended_the_engine_is_not_loaded_again(
    drifted: Drifted, promoted: UUID, engine: EngineStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where its memory does not suffice for both: it would be ended again and again, by the sidecar."""
    promoted_an_hour_ago(drifted)
    engine.start_again()
    with monkeypatch.context() as patched:
        away(engine, patched)
        with pytest.raises(EngineRefused):
            settle(drifted.database, drifted.settings, "engine-1")
    engine.lose = ""
    engine.start_again()
    settle(drifted.database, make_settings(tmp_path / "data", engine.url), "engine-1")
    assert (engine.serving["version"], engine.calls) == (drifted.parent, ["load"])
    assert states(drifted) == {drifted.parent: "in_service", CANDIDATE: "lost"}
    assert "so that it may be what ended it" in (the_run(drifted, promoted).reason or "")


def test_an_engine_that_is_stopping_gets_it_after_its_next_start(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    """It is restarted twice, as by a deployment that is corrected at once."""
    promoted_an_hour_ago(drifted)
    engine.start_again()
    engine.stops = True
    with pytest.raises(EngineRefused, match="the engine stops"):
        settle(drifted.database, drifted.settings, "engine-1")
    assert states(drifted) == {drifted.parent: "retired", CANDIDATE: "in_service"}
    start_again(drifted, engine)
    assert engine.serving["version"] == CANDIDATE
    assert the_run(drifted, promoted).state == "watching"


def test_an_engine_that_went_away_before_it_got_it_gets_it_after_its_next_start(
    drifted: Drifted, promoted: UUID, engine: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted_an_hour_ago(drifted)
    engine.start_again()
    request = httpx.request

    def refused(method: str, *arguments: Any, **named: Any) -> httpx.Response:
        if method == "POST":
            raise httpx.ConnectError("connection refused")
        return request(method, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(httpx, "request", refused)
        with pytest.raises(EngineRefused, match="connection refused"):
            settle(drifted.database, drifted.settings, "engine-1")
    start_again(drifted, engine)
    assert engine.serving["version"] == CANDIDATE


def served(drifted: Drifted, since: timedelta) -> None:
    """What has happened so far was so much earlier."""
    with drifted.database.session() as session:
        (draft,) = session.query(Draft).where(Draft.version == CANDIDATE)
        draft.promoted_at = draft.promoted_at and draft.promoted_at - since
        run = retrain_runs.find(session, draft.retrain_run_id) if draft.retrain_run_id else None
        assert run is not None
        numbers = retrain_runs.numbers_of(run)
        run.numbers = replace(numbers, put_back_at=tuple(at - since for at in numbers.put_back_at))


def test_one_that_is_lost_again_soon_after_it_was_put_back_is_not_put_back_again(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    """As where it ends its engine by a request that comes every twenty minutes."""
    promoted_an_hour_ago(drifted)
    start_again(drifted, engine)
    served(drifted, timedelta(minutes=20))
    with capture_logs() as logs:
        start_again(drifted, engine)
    assert (engine.serving["version"], engine.calls) == (drifted.parent, ["load", "activate"])
    assert states(drifted) == {drifted.parent: "in_service", CANDIDATE: "lost"}
    told = (
        f"draft {drifted.parent} serves, and it was not put back: the engine ended within an hour of getting "
        "it back, so that it may be what ended it"
    )
    assert told in (the_run(drifted, promoted).reason or "")
    (line,) = [line for line in logs if line["event"] == "promoted draft lost"]
    assert told in line["reason"]
    with drifted.database.session() as session:
        assert told in (incidents.transitions(session, drifted.incident_id)[-1].reason or "")


def test_one_that_is_lost_every_two_hours_is_put_back_four_times_a_day_and_no_more(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    promoted_an_hour_ago(drifted)
    for times in range(1, 5):
        served(drifted, timedelta(hours=2))
        start_again(drifted, engine)
        assert (engine.serving["version"], engine.calls.count("load")) == (CANDIDATE, times)
    served(drifted, timedelta(hours=2))
    start_again(drifted, engine)
    assert (engine.serving["version"], engine.calls.count("load")) == (drifted.parent, 4)
    assert states(drifted) == {drifted.parent: "in_service", CANDIDATE: "lost"}
    assert (
        "it was not put back: it was put back 4 times within a day, and lost each time, so that it may be "
        "what ends the engine"
    ) in (the_run(drifted, promoted).reason or "")


def test_an_engine_that_is_restarted_three_times_a_day_gets_it_back_each_time(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    promoted_an_hour_ago(drifted)
    for _ in range(3):
        for hours in (9, 3, 12):
            served(drifted, timedelta(hours=hours))
            start_again(drifted, engine)
            assert engine.serving["version"] == CANDIDATE
    assert the_run(drifted, promoted).state == "watching"


def test_one_that_the_engine_itself_gave_up_is_not_put_back(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    """It was kept in --state-dir, and the engine ended again and again with it."""
    promoted_an_hour_ago(drifted)
    engine.given_up = CANDIDATE
    start_again(drifted, engine)
    assert (engine.serving["version"], engine.calls) == (drifted.parent, [])
    assert states(drifted) == {drifted.parent: "in_service", CANDIDATE: "lost"}
    assert "it was not put back: the engine has ended again and again with it, and gave it up" in (
        the_run(drifted, promoted).reason or ""
    )


def test_one_whose_activation_was_done_and_not_answered_is_in_service(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    promoted_an_hour_ago(drifted)
    engine.start_again()
    engine.lose = "activate"
    settle(drifted.database, drifted.settings, "engine-1")
    assert engine.serving["version"] == CANDIDATE
    assert states(drifted) == {drifted.parent: "retired", CANDIDATE: "in_service"}
    run = the_run(drifted, promoted)
    assert run.state == "watching"
    assert "it was put back" in (run.reason or "")


def test_a_draft_of_earlier_that_the_engine_is_started_with_stays(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    """Somebody has returned to what served before the parent of the promoted draft."""
    promoted_an_hour_ago(drifted)
    with drifted.database.session() as session:
        long_ago = datetime.now(UTC) - timedelta(days=30)
        values = {"server": "engine-1", "target": "target", "method": "draft_model", "name": "draft"}
        session.add(
            Draft(version="earlier", state="retired", created_at=long_ago, promoted_at=long_ago, **values)
        )
    engine.first = {**engine.first, "version": "earlier"}
    start_again(drifted, engine)
    assert engine.serving["version"] == "earlier"
    assert states(drifted)["earlier"] == "in_service"


def test_the_run_tells_the_last_time_alone_and_the_moment_it_serves_since(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    """An engine without --state-dir may be started again each night."""
    for _ in range(3):
        promoted_an_hour_ago(drifted)
        start_again(drifted, engine)
    reason = the_run(drifted, promoted).reason or ""
    assert reason.count("lost it") == 1
    assert reason.endswith("and it was put back (with --state-dir the engine keeps it)")


def test_a_lost_draft_that_is_rolled_back_by_hand_is_not_loaded_for_that(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    """It may be rolled back because it ended the engine."""
    promoted_an_hour_ago(drifted)
    engine.start_again()
    serving = roll_back(
        drifted.database, drifted.settings, server="engine-1", draft_version=CANDIDATE, reason="it crashes"
    )
    assert (serving.version, engine.calls) == (drifted.parent, ["activate"])
    assert states(drifted) == {drifted.parent: "in_service", CANDIDATE: "rolled_back"}
    assert the_run(drifted, promoted).state == "rolled_back"


def test_what_another_process_put_back_meanwhile_is_not_taken_for_lost(
    drifted: Drifted, promoted: UUID, engine: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question what serves and the lock."""
    promoted_an_hour_ago(drifted)
    engine.start_again()
    try_lock = retrain_runs.try_lock

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        settle(drifted.database, drifted.settings, "engine-1")
        return try_lock(*arguments)

    monkeypatch.setattr(retrain_runs, "try_lock", late)
    settle(drifted.database, drifted.settings, "engine-1")
    assert engine.serving["version"] == CANDIDATE
    assert states(drifted) == {drifted.parent: "retired", CANDIDATE: "in_service"}
    assert the_run(drifted, promoted).state == "watching"
