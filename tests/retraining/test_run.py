"""One retraining: rejected, then promoted, and what can go wrong in between."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn
from uuid import NAMESPACE_OID, UUID, uuid5

import psutil
import pytest
from driftguard_training.model_directories import model_version
from sqlalchemy import text
from structlog.testing import capture_logs

from driftguard.errors import DatabaseUnavailable
from driftguard.records.documents.retraining_run import Decision, TrainingCurve
from driftguard.retraining import attempt
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.ledger.outcome import Progress, RetrainOutcome
from driftguard.retraining.promotion.reconcile import settle
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.retraining.run import retrain
from driftguard.retraining.training import checksums, process
from driftguard.retraining.training.gate import decide
from driftguard.retraining.training.plan import is_held_out
from driftguard.retraining.training.process import TrainingFailed, TrainingStopped
from driftguard.retraining.training.workspace import Workspace
from driftguard.settings import Settings
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun
from tests.alerting.http_receiver import wait_until
from tests.retraining.conftest import Drifted
from tests.retraining.engine_stub import EngineStub
from tests.retraining.world import (
    NEW,
    OLD,
    Models,
    capture,
    drift,
    incident_states,
    make_settings,
    requests_of,
    trained,
)
from tests.training.small_models import save_directory, small_model

Requests = list[tuple[list[int], list[int]]]
LONG = [1] * 60, [2] * 10  # of a context of 64 tokens
FOREIGN = [1, 5], [2] * 8 + [32]  # of a vocabulary of 32 tokens


def run_of(drifted: Drifted, outcome: RetrainOutcome) -> RetrainRun:
    assert outcome.run_id is not None
    with drifted.database.session() as session:
        run = retrain_runs.find(session, outcome.run_id)
    assert run is not None
    return run


def curve_of(drifted: Drifted, run: RetrainRun) -> TrainingCurve:
    with drifted.database.session() as session:
        curve = retrain_runs.curve_of(session, run.id)
    assert curve is not None
    return curve


def state_of_draft(drifted: Drifted, version: str | None) -> str | None:
    with drifted.database.session() as session:
        draft = drafts.find(session, "engine-1", "target", version or "")
        return draft.state if draft else None


def captured_fall(database: Database, models: Models, new: Requests, old: Requests) -> UUID:
    """A fall of the new segment for which these requests were captured; returns the incident's id."""
    version, changed_at = model_version(models.draft), datetime.now(UTC) - timedelta(minutes=5)
    incident_id = drift(database, version, changed_at)
    capture(database, version, OLD, old, changed_at - timedelta(minutes=2))
    capture(database, version, NEW, new, changed_at + timedelta(seconds=1))
    return incident_id


def held_out(number: int, settings: Settings) -> bool:
    """Whether the gate gets this one of the new segment's requests."""
    return is_held_out(str(uuid5(NAMESPACE_OID, f"{NEW}-{number}")), settings.retraining.heldout_fraction)


@pytest.mark.usefixtures("training_here")
def test_a_rejected_candidate_changes_nothing_and_the_same_weights_can_be_promoted_later(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    told: list[Progress] = []
    strict = make_settings(tmp_path / "data", engine.url, minimum_gain=0.9)
    outcome = retrain(drifted.database, strict, on_progress=told.append)
    assert (outcome.state, outcome.exit_code) == ("rejected", 4)
    assert "a gain of +0.900 in single draft tokens is needed" in outcome.reason
    run = run_of(drifted, outcome)
    assert (run.state, run.trigger, run.parent_version) == ("rejected", "manual", drifted.parent)
    assert run.numbers is not None
    assert run.numbers.gate is not None
    assert run.numbers.gate.gain.difference > 0.05
    curve = curve_of(drifted, run)
    assert [point.step for point in curve.training.points] == [10, 20, 30, 40, 50, 60]
    assert [point.step for point in curve.held_out.points] == [*range(0, 61, 6)]
    assert curve.held_out.points[-1].acceptance > curve.held_out.points[0].acceptance + 0.05
    assert state_of_draft(drifted, run.candidate_version) == "rejected"
    assert engine.serving["version"] == drifted.parent
    assert engine.calls == []
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]
    assert [one.stage for one in told if one.step in (None, 60)] == [
        "collecting", "training", "training", "evaluating",
    ]  # fmt: skip
    assert list((tmp_path / "data" / "retraining").iterdir()) == []

    engine.lose = "activate"  # the engine acts, but its answer never arrives
    outcome = retrain(drifted.database, drifted.settings)
    assert (outcome.state, outcome.exit_code) == ("promoted", 0)
    promoted = run_of(drifted, outcome)
    assert promoted.candidate_version == run.candidate_version == engine.serving["version"]
    assert promoted.state == "watching"
    assert state_of_draft(drifted, run.candidate_version) == "in_service"
    assert state_of_draft(drifted, drifted.parent) == "retired"
    assert incident_states(drifted.database, drifted.incident_id)[-1] == "mitigating"

    outcome = retrain(drifted.database, drifted.settings, incident_id=drifted.incident_id)
    assert outcome.state == "nothing_to_do"
    assert f"is about draft {drifted.parent}; draft {run.candidate_version} is in service" in outcome.reason


@pytest.mark.usefixtures("training_here")
def test_a_refusing_engine_fails_the_run_and_keeps_the_draft(drifted: Drifted, engine: EngineStub) -> None:
    engine.refuse = "load"
    outcome = retrain(drifted.database, drifted.settings)
    assert (outcome.state, outcome.exit_code) == ("failed", 1)
    assert "out of memory" in outcome.reason
    assert engine.serving["version"] == drifted.parent
    assert run_of(drifted, outcome).state == "failed"
    assert state_of_draft(drifted, drifted.parent) == "in_service"
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]


def by_another_target(engine: EngineStub) -> str:
    engine.target_name = "another"
    return "engine-1 serves target another at"


def by_the_same_target_anew(engine: EngineStub) -> str:
    """As a revision of a model that goes by the same name."""
    engine.target = engine.target.parent / "target-2"
    return f"engine-1 serves target target at {engine.target} now, not target at"


def by_another_draft(engine: EngineStub) -> str:
    """As where somebody puts it into service."""
    engine.serving = {**engine.serving, "version": "of-the-operator"}
    return "draft of-the-operator is in service on engine-1 now"


@pytest.mark.usefixtures("training_here")
@pytest.mark.parametrize("replaced", [by_another_target, by_the_same_target_anew, by_another_draft])
def test_what_serves_instead_by_the_time_the_candidate_is_judged_stays(
    drifted: Drifted, engine: EngineStub, replaced: Callable[[EngineStub], str]
) -> None:
    """The candidate was made for, and judged against, something else."""
    told: list[str] = []

    def replace_while_judged(progress: Progress) -> None:
        told.extend([replaced(engine)] if progress.stage == "evaluating" else [])

    outcome = retrain(drifted.database, drifted.settings, on_progress=replace_while_judged)
    assert (outcome.state, engine.calls) == ("failed", [])
    assert told[0] in outcome.reason
    assert run_of(drifted, outcome).state == "failed"
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]


@pytest.mark.usefixtures("training_here")
@pytest.mark.parametrize("is_away", [False, True])
def test_a_draft_that_somebody_puts_into_service_while_another_is_made_keeps_its_files(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """One of long ago, which is stored as retired as long as the training lasts."""
    monkeypatch.setattr(attempt, "AWAY_SECONDS", 0.0)
    older = tmp_path / "data" / "drafts" / "older"
    older.mkdir(parents=True)
    trained(drifted.database, drifted.incident_id, drifted.parent, "older", str(older), "promoted")
    settings = make_settings(tmp_path / "data", engine.url, keep_candidates=1)

    def serve_older(progress: Progress) -> None:
        if progress.stage == "evaluating":
            engine.load({"version": "older", "directory": str(older)})
            engine.activate("older")
        elif progress.stage == "promoting" and is_away:
            engine.mute = True

    outcome = retrain(drifted.database, settings, on_progress=serve_older)
    assert outcome.state == "failed"
    assert older.is_dir()
    engine.mute = False
    settle(drifted.database, settings, "engine-1")
    assert older.is_dir()
    assert state_of_draft(drifted, "older") == "in_service"


@pytest.mark.usefixtures("training_here")
@pytest.mark.parametrize("at", ["training", "evaluating", "promoting"])
def test_a_candidate_for_a_target_whose_files_are_replaced_meanwhile_is_not_promoted(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, at: str
) -> None:
    """As by a deployment of the night: another revision, in the same directory and by the same name."""
    engine.target = Path(shutil.copytree(engine.target, tmp_path / "target"))
    weights = engine.target / "model.safetensors"

    def replace_weights(progress: Progress) -> None:
        if progress.stage == at and progress.step is None:
            others = weights.read_bytes()
            weights.unlink()
            weights.write_bytes(others)
            os.utime(weights, (1, 1))

    outcome = retrain(drifted.database, drifted.settings, on_progress=replace_weights)
    assert (outcome.state, engine.calls) == ("failed", [])
    assert outcome.reason == (
        f"model.safetensors of target target in {engine.target} was changed since the training began: the "
        "candidate was made for another one"
    )
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]


@pytest.mark.usefixtures("training_here")
@pytest.mark.parametrize(("kept", "told"), [(0, "0 of 4"), (100, "[0-9]+ of 4"), (199, None)])
def test_captured_requests_that_are_deleted_before_they_are_read_decide_nothing(
    drifted: Drifted, engine: EngineStub, kept: int, told: str | None
) -> None:
    """By their retention, or by somebody who asked for it: what is left is judged as what was there."""

    def delete_most(progress: Progress) -> None:
        if progress.stage == "collecting":
            with drifted.database.session() as session:
                newest = (
                    "SELECT record_id FROM captures WHERE segment = :segment ORDER BY id DESC LIMIT :kept"
                )
                of_segment = f"DELETE FROM captures WHERE segment = :segment AND record_id NOT IN ({newest})"
                session.execute(text(of_segment), {"segment": NEW, "kept": kept})

    outcome = retrain(drifted.database, drifted.settings, on_progress=delete_most)
    if told is None:
        assert outcome.state == "promoted"
    else:
        assert outcome.state == "failed"
        left = f"captured requests were deleted meanwhile: {kept} of 200 of the changed traffic are left"
        assert re.match(f"{left}, {told}", outcome.reason)
        assert engine.calls == []


@pytest.mark.usefixtures("training_here")
@pytest.mark.parametrize("how", ["stops", "is away"])
def test_an_engine_that_is_started_again_when_its_draft_is_ready_is_waited_for(
    drifted: Drifted, engine: EngineStub, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As by a deployment of the night, after a training of an hour."""
    waited: list[float] = []

    def away(progress: Progress) -> None:
        if progress.stage == "promoting":
            engine.stops, engine.mute = how == "stops", how == "is away"

    def back(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            engine.stops = engine.mute = False

    monkeypatch.setattr("time.sleep", back)
    outcome = retrain(drifted.database, drifted.settings, on_progress=away)
    assert (outcome.state, len(waited)) == ("promoted", 3)
    assert engine.serving["version"] == run_of(drifted, outcome).candidate_version


@pytest.mark.usefixtures("training_here")
def test_an_engine_that_stays_away_when_its_draft_is_ready_fails_the_run(
    drifted: Drifted, engine: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(progress: Progress) -> None:
        engine.mute = engine.mute or progress.stage == "promoting"

    monkeypatch.setattr(attempt, "AWAY_SECONDS", 0.0)
    outcome = retrain(drifted.database, drifted.settings, on_progress=away)
    assert outcome.state == "failed"
    assert "cannot be reached" in outcome.reason


def is_running(drifted: Drifted) -> bool:
    with drifted.database.session() as session:
        return retrain_runs.is_running(session, "engine-1", "target")


END_HOLDERS = """
    SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database
    = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def test_a_training_that_lost_its_lock_ends_at_once(
    drifted: Drifted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database was started again: what is trained on cannot be promoted, and another one may begin. One
    that does not answer for a while is waited for."""
    monkeypatch.setattr(attempt, "LOCK_LOOK_SECONDS", 0.1)

    def not_answered(*_: object) -> NoReturn:
        raise DatabaseUnavailable("no answer for 8 s")

    def train(_: Sequence[str], __: Path, should_stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        with monkeypatch.context() as silent:
            silent.setattr(Database, "session", not_answered)
            time.sleep(0.2)
            assert not should_stop()  # it has looked
        with drifted.database.session() as session:
            session.execute(text(END_HOLDERS))
        wait_until(should_stop, "the training is asked to end")
        yield from ()
        raise TrainingStopped("stopped on request")

    monkeypatch.setattr(process, "_run", train)
    outcome = retrain(drifted.database, drifted.settings)
    assert outcome.state == "failed"
    assert outcome.reason.endswith("the lock of this retraining was lost with its connection to the database")
    assert run_of(drifted, outcome).reason == outcome.reason


def test_a_training_that_lost_its_lock_leaves_its_incident_to_the_next_one(
    drifted: Drifted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sidecar has ended the run meanwhile, and begun one of its own."""
    monkeypatch.setattr(attempt, "LOCK_LOOK_SECONDS", 0.1)

    def train(_: Sequence[str], __: Path, should_stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        with drifted.database.session() as session:
            session.execute(text(END_HOLDERS))
        wait_until(lambda: not is_running(drifted), "the lock is free")
        settle(drifted.database, drifted.settings, "engine-1")
        with drifted.database.session() as session:
            at = retrain_runs.now(session)
            incident_notes.begin_mitigation(session, drifted.incident_id, "the next retraining", at)
        wait_until(should_stop, "the training is asked to end")
        yield from ()
        raise TrainingStopped("stopped on request")

    monkeypatch.setattr(process, "_run", train)
    outcome = retrain(drifted.database, drifted.settings)
    assert outcome.state == "failed"
    assert str(run_of(drifted, outcome).reason).startswith("interrupted while training; ")
    assert incident_states(drifted.database, drifted.incident_id)[-1] == "mitigating"


@pytest.mark.usefixtures("training_here")
def test_a_run_that_lost_its_lock_while_the_engine_loads_activates_nothing(
    drifted: Drifted, engine: EngineStub
) -> None:
    """The database was started again, and another process has settled the run: nobody would watch the
    draft."""
    engine.hold = "load"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(retrain, drifted.database, drifted.settings)
        assert engine.held.wait(60)
        with drifted.database.session() as session:
            session.execute(text(END_HOLDERS))
        wait_until(lambda: not is_running(drifted), "the lock is free")
        settle(drifted.database, drifted.settings, "engine-1")
        engine.release.set()
        outcome = running.result()
    assert (outcome.state, engine.calls) == ("failed", ["load"])
    assert "lock" in outcome.reason
    assert engine.serving["version"] == drifted.parent
    assert state_of_draft(drifted, drifted.parent) == "in_service"


@pytest.mark.usefixtures("training_here")
def test_a_candidate_that_is_changed_after_it_was_judged_never_reaches_the_engine(
    drifted: Drifted, engine: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = decide
    flipped: list[Path] = []

    def judge_and_flip(*arguments: Any, **named: Any) -> Decision:
        (weights,) = drifted.settings.data_directory.glob("drafts/*/model.safetensors")
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        flipped.append(weights)
        return judge(*arguments, **named)

    monkeypatch.setattr(attempt, "decide", judge_and_flip)
    outcome = retrain(drifted.database, drifted.settings)
    assert outcome.state == "failed"
    assert outcome.reason == f"{flipped[0]} is not as the training wrote it (SHA256SUMS)"
    assert engine.calls == []
    assert engine.serving["version"] == drifted.parent
    assert state_of_draft(drifted, drifted.parent) == "in_service"

    # The next run makes the same weights: the changed ones are not taken for them.
    monkeypatch.setattr(attempt, "decide", judge)
    again = retrain(drifted.database, drifted.settings)
    assert again.state == "promoted"
    assert again.numbers is not None
    checksums.verify(flipped[0].parent, again.numbers.checksums_sha256 or "")


def test_what_the_training_refuses_is_told_by_its_own_words(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    traffic = tmp_path / "traffic.jsonl"
    line = '{"segment": "german", "prompt_token_ids": [1, %d], "output_token_ids": [2]}\n'
    traffic.write_text("".join(line % number for number in range(2, 400)))
    outcome = retrain(drifted.database, drifted.settings, traffic=traffic)
    assert outcome.state == "failed"
    assert "token ids are 0 to 31" in outcome.reason
    assert engine.calls == []


def test_reports_that_make_no_sense_do_no_harm_and_what_came_before_a_failure_is_kept(
    drifted: Drifted, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[dict[str, Any]] = [
        {"event": "progress", "step": step, "steps": 60, "loss": loss, "acceptance": 0.5}
        for step, loss in [(10, 2.0), (20, float("nan")), (5, 1.0), (30, 1.5)]
    ]

    def fails(*_: object) -> Iterator[dict[str, Any]]:
        yield from [*reports, {"event": "progress"}]
        raise TrainingFailed("the training process ended with code -9: out of memory")

    monkeypatch.setattr(process, "_run", fails)
    told: list[Progress] = []
    outcome = retrain(drifted.database, drifted.settings, on_progress=told.append)
    assert (outcome.state, outcome.reason) == (
        "failed",
        "the training process ended with code -9: out of memory",
    )
    assert [one.step for one in told if one.step] == [10, 30]
    curve = curve_of(drifted, run_of(drifted, outcome))
    assert [(point.step, point.loss) for point in curve.training.points] == [(10, 2.0), (30, 1.5)]
    assert (curve.left_out, curve.left_out_reason) == (3, "loss: nan is not a finite number")


def test_a_training_that_the_kernel_kills_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short it writes nothing of it into the training's log."""
    (tmp_path / "driftguard_training.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(TrainingFailed, match=r"killed by SIGKILL.*memory.*; its log was: \(empty\)"):
        list(process._run([], tmp_path / "log", lambda: False))


def test_a_training_ends_with_the_process_that_ties_it_to_its_starter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where that one alone is killed: nobody would take the result."""
    (tmp_path / "driftguard_training.py").write_text(
        "import json, os\n"
        "print(json.dumps({'training': os.getpid(), 'tie': os.getppid()}), flush=True)\n"
        "while True:\n    print('{}', flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    looks: list[None] = []

    def has_gone_on_for_long() -> bool:
        looks.append(None)
        return len(looks) > 100_000

    events = process._run([], tmp_path / "log", has_gone_on_for_long)
    started = next(events)
    family = [psutil.Process(started["tie"]), psutil.Process(started["training"])]
    family[0].kill()
    with pytest.raises(TrainingFailed, match="killed by SIGKILL"):
        list(events)
    assert psutil.wait_procs(family, timeout=60)[1] == []


def test_the_training_takes_no_modules_from_the_directory_in_which_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which for a batch job is any directory of its user."""
    monkeypatch.chdir(tmp_path)
    for name in ("driftguard", "driftguard_training", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    with pytest.raises(TrainingFailed, match=r"code 2: .*invalid choice: 'no-such-command'"):
        list(process._run(["no-such-command"], tmp_path / "log", lambda: False))


def test_a_wish_to_stop_ends_the_training(drifted: Drifted, engine: EngineStub, tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "data", engine.url, steps=100_000)
    steps: list[int] = []

    def note(progress: Progress) -> None:
        steps.extend([progress.step] if progress.step else [])

    outcome = retrain(drifted.database, settings, on_progress=note, should_stop=lambda: bool(steps))
    assert outcome.state == "failed"
    assert "stopped on request" in outcome.reason
    assert max(steps) < 1_000
    assert list((tmp_path / "data" / "drafts").iterdir()) == []


@pytest.mark.parametrize("what", ["target", "serving"])
def test_models_that_lie_elsewhere_are_named(drifted: Drifted, engine: EngineStub, what: str) -> None:
    elsewhere = "/models/of/another/machine"
    if what == "target":
        engine.target = Path(elsewhere)
    else:
        engine.serving["directory"] = elsewhere
    outcome = retrain(drifted.database, drifted.settings)
    assert outcome.state == "failed"
    assert elsewhere in outcome.reason


@pytest.mark.usefixtures("training_here")
def test_captured_requests_longer_than_the_draft_s_context_do_not_keep_it_from_being_retrained(
    database: Database, engine: EngineStub, models: Models, tmp_path: Path
) -> None:
    """An engine serves, and captures, what is longer: in changed segments and in others, held out or not."""
    settings = make_settings(tmp_path / "data", engine.url)
    new, old = ([LONG] * 20 + requests_of(path) for path in (models.new_traffic, models.old_traffic))
    incident_id = captured_fall(database, models, new, old)
    long, fitting = (sum(held_out(n, settings) for n in some) for some in (range(20), range(20, len(new))))
    assert 0 < long < 20
    outcome = retrain(database, settings, incident_id=incident_id)
    assert outcome.state == "promoted"
    assert outcome.numbers is not None
    assert outcome.numbers.gate is not None
    assert outcome.numbers.gate.gain.requests == fitting
    assert outcome.numbers.requests is not None
    assert outcome.numbers.requests.train == len(new) - 20 - fitting


def test_captured_requests_that_cannot_be_learned_from_are_none_of_those_needed(
    database: Database, engine: EngineStub, models: Models, tmp_path: Path
) -> None:
    settings = make_settings(tmp_path / "data", engine.url)
    new = [LONG] * 114 + requests_of(models.new_traffic)[:14]
    incident_id = captured_fall(database, models, new, [])
    outcome = retrain(database, settings, incident_id=incident_id)
    assert (outcome.state, outcome.waits_for_traffic) == ("nothing_to_do", True)
    assert outcome.reason.startswith("only 14 captured requests since the change that fit")


@pytest.mark.usefixtures("training_here")
def test_weights_that_were_rolled_back_are_not_promoted_again_unless_somebody_says_so(
    drifted: Drifted, engine: EngineStub
) -> None:
    """The nightly job makes them again of the same captured requests."""
    first = retrain(drifted.database, drifted.settings)
    made = run_of(drifted, first).candidate_version
    assert first.state == "promoted"
    assert made is not None
    back = roll_back(
        drifted.database, drifted.settings, server="engine-1", draft_version=made, reason="it loops"
    )
    assert back.version == drifted.parent
    again = retrain(drifted.database, drifted.settings, trigger="nightly")
    assert (again.state, again.exit_code) == ("rejected", 4)
    assert again.reason == (
        f"the training made draft {made} again, which was rolled back; capture more, or --force promotes it "
        "where it passes the gate"
    )
    assert run_of(drifted, again).state == "rejected"
    assert state_of_draft(drifted, made) == "rolled_back"
    assert engine.serving["version"] == drifted.parent
    assert incident_states(drifted.database, drifted.incident_id)[-1] == "open"
    assert retrain(drifted.database, drifted.settings, force=True).state == "promoted"
    assert state_of_draft(drifted, made) == "in_service"


@pytest.mark.usefixtures("training_here")
def test_answers_that_another_target_gave_under_its_name_are_told(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    """Its weights were replaced between capture and training, by a revision of the same directory."""
    own = retrain(drifted.database, make_settings(tmp_path / "data", engine.url, minimum_gain=0.9))
    assert "captured answers" not in own.reason
    save_directory(tmp_path / "other", small_model(7))
    engine.target = tmp_path / "other"
    with capture_logs() as logs:
        outcome = retrain(drifted.database, drifted.settings)
    assert re.search(
        r"; the captured answers are not those of this target at temperature 1: they surprise it by \d\.\d\d "
        r"nats per token more than its own would; were its weights replaced since they were captured\?$",
        outcome.reason,
    )
    assert outcome.reason.endswith(run_of(drifted, outcome).reason or "none")
    assert any(one["event"] == "the captured answers are not those of this target" for one in logs)


@pytest.mark.usefixtures("training_here")
def test_captured_requests_with_tokens_that_the_target_lacks_are_left_out_and_counted(
    database: Database, engine: EngineStub, models: Models, tmp_path: Path
) -> None:
    """As where a target with a smaller vocabulary took over its name, or where a client lies: they are kept
    for days, in changed segments and in others, held out or not."""
    settings = make_settings(tmp_path / "data", engine.url)
    new, old = ([FOREIGN] * 20 + requests_of(path) for path in (models.new_traffic, models.old_traffic))
    incident_id = captured_fall(database, models, new, old)
    foreign, known = (sum(held_out(n, settings) for n in some) for some in (range(20), range(20, len(new))))
    assert 0 < foreign < 20
    with capture_logs() as logs:
        outcome = retrain(database, settings, incident_id=incident_id)
    left_out = (
        "40 captured requests are left out: they have token ids that the target's vocabulary of 32 lacks"
    )
    assert outcome.state == "promoted"
    assert outcome.reason.endswith(f"; {left_out}")
    (told,) = (one for one in logs if "are left out" in one["event"])
    assert (told["requests"], told["vocabulary"]) == (40, 32)
    with database.session() as session:
        run = retrain_runs.find(session, outcome.run_id or UUID(int=0))
    assert run is not None
    assert left_out in (run.reason or "")
    numbers = retrain_runs.numbers_of(run)
    assert numbers.gate is not None
    assert numbers.gate.gain.requests == known
    assert numbers.requests is not None
    assert (numbers.requests.train, numbers.requests.out_of_vocabulary) == (len(new) - 20 - known, 40)


@pytest.mark.parametrize("kind", ["model", "corpus", "text_config", "decoder"])
def test_a_run_that_tokens_unknown_to_the_target_leave_with_too_little_waits_for_more(
    database: Database, engine: EngineStub, models: Models, tmp_path: Path, kind: str
) -> None:
    """It has not failed: a failed run is repeated a few times only. The last two: a target that also sees,
    whose configuration has that of its language model inside."""
    if kind == "corpus":
        engine.serving = {**engine.serving, "method": "suffix", "directory": None}
    elif kind != "model":
        engine.target = tmp_path / "target"
        engine.target.mkdir()
        inner = json.loads((models.target / "config.json").read_text())
        (engine.target / "config.json").write_text(json.dumps({"model_type": "sees", kind: inner}))
    settings = make_settings(tmp_path / "data", engine.url)
    new = [FOREIGN] * 114 + requests_of(models.new_traffic)[:14]
    incident_id = captured_fall(database, models, new, [])
    outcome = retrain(database, settings, incident_id=incident_id)
    assert (outcome.state, outcome.waits_for_traffic) == ("nothing_to_do", True)
    assert outcome.reason == (
        "only 14 captured requests since the change, 128 needed; 114 captured requests are left out: they "
        "have token ids that the target's vocabulary of 32 lacks"
    )


@pytest.mark.usefixtures("training_here")
def test_a_run_that_no_held_out_request_of_the_change_can_judge_fails_with_that_reason(
    database: Database, engine: EngineStub, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the length of the context is known to the training alone."""
    monkeypatch.setattr("driftguard.retraining.run.context_of", lambda *_: None)
    settings = make_settings(tmp_path / "data", engine.url, steps=1)
    new, judging = requests_of(models.new_traffic), [n for n in range(200) if held_out(n, settings)]
    for number in judging:
        new[number] = LONG
    incident_id = captured_fall(database, models, new, requests_of(models.old_traffic))
    with capture_logs() as logs:
        outcome = retrain(database, settings, incident_id=incident_id)
    (told,) = (one["requests"] for one in logs if "are left out" in one["event"])
    assert told == {f"changed:{NEW}": len(judging)}
    assert outcome.state == "failed"
    assert outcome.reason == (
        "there is no held-out request of the changed traffic to judge the candidate by; left out because "
        f"they are longer than the models' context: {len(judging)} of changed:{NEW}"
    )
    assert incident_states(database, incident_id) == ["open", "mitigating", "open"]


@pytest.mark.usefixtures("training_here")
def test_drafts_may_be_on_a_file_system_of_their_own(
    drifted: Drifted, engine: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a volume that the engines mount too. The second run replaces a draft whose files are damaged."""
    data_dir, rename = drifted.settings.data_directory, Path.rename

    def within_one(self: Path, target: Path) -> Path:
        if self.relative_to(data_dir).parts[0] != Path(target).relative_to(data_dir).parts[0]:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(self), None, str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", within_one)
    strict = make_settings(data_dir, engine.url, minimum_gain=0.9)
    rejected = run_of(drifted, retrain(drifted.database, strict))
    assert rejected.state == "rejected", rejected.reason
    made = data_dir / "drafts" / (rejected.candidate_version or "")
    (made / "config.json").write_text("{}")
    outcome = retrain(drifted.database, drifted.settings)
    assert outcome.state == "promoted", outcome.reason
    assert engine.serving["directory"] == str(made)
    checksums.verify(made)
    assert list((data_dir / "drafts").iterdir()) == [made]


def test_a_drafts_directory_that_nothing_can_be_kept_in_is_named_before_the_training(
    drifted: Drifted, engine: EngineStub
) -> None:
    data_dir = drifted.settings.data_directory
    data_dir.mkdir()
    (data_dir / "drafts").symlink_to("/proc/self")
    outcome = retrain(drifted.database, drifted.settings)
    run = run_of(drifted, outcome)
    assert (run.state, run.progress) == ("failed", None)
    assert re.search(rf"'{data_dir}/drafts/{run.id}'$", run.reason or "")
    assert list((data_dir / "retraining").iterdir()) == []


@pytest.mark.parametrize("where", ["retraining", "drafts"])
def test_a_directory_that_this_user_may_not_enter_fails_the_run(
    drifted: Drifted, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    closed, makes, looks = drifted.settings.data_directory / where, Path.mkdir, Path.stat

    def check(path: Path) -> None:
        if closed in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def mkdir(self: Path, *arguments: Any, **named: Any) -> None:
        check(self)
        makes(self, *arguments, **named)

    def stat(self: Path, **named: Any) -> os.stat_result:
        check(self)
        return looks(self, **named)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "stat", stat)
    outcome = retrain(drifted.database, drifted.settings)
    run = run_of(drifted, outcome)
    assert (outcome.state, run.state) == ("failed", "failed")
    assert outcome.reason == f"[Errno 13] Permission denied: '{closed / str(run.id)}'"


def test_a_disk_that_fills_while_traffic_is_written_is_named(
    drifted: Drifted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a write tells no file."""
    monkeypatch.setattr(Workspace, "train", Path("/dev/full"))
    outcome = retrain(drifted.database, drifted.settings)
    assert outcome.reason == f"[Errno 28] No space left on device, in {drifted.settings.data_directory}"
    assert list((drifted.settings.data_directory / "retraining").iterdir()) == []


def test_a_full_disk_ends_the_run_with_that_reason(
    drifted: Drifted, engine: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def full(self: Path, *arguments: Any, **named: Any) -> None:
        if drifted.settings.data_directory in self.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        mkdir(self, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    outcome = retrain(drifted.database, drifted.settings)
    assert (outcome.state, outcome.exit_code) == ("failed", 1)
    run = run_of(drifted, outcome)
    directory = drifted.settings.data_directory / "retraining" / str(run.id)
    assert run.reason == outcome.reason == f"[Errno 28] No space left on device: '{directory}'"
    assert run.state == "failed"
    assert run.ended_at is not None
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]
    assert engine.calls == []
