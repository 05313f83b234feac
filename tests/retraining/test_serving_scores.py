"""Captured requests of an incident are scored in a process of their own, once there are enough of them, and
before anything is retrained for it. Why they are not is stored as a code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import msgspec
import procrastinate
import pytest
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.model_directories import load_model, model_version
from driftguard_training.serving import score_batch
from driftguard_training.traffic import ServedRequest
from sqlalchemy import text

from driftguard.diagnosis.serving_gap import Expected
from driftguard.incidents import diagnosing
from driftguard.incidents.opening import NOBODY
from driftguard.records.documents.serving_scores import MissingScores, ServingScores
from driftguard.retraining import serving_scores
from driftguard.retraining.engines import candidate_kind
from driftguard.retraining.tasks import NAMESPACE, RetrainingJobs
from driftguard.retraining.training import process
from driftguard.settings import EngineSettings, Settings
from driftguard.store import serving_scores as stored
from driftguard.store.captures import CapturedRequest, insert_captures
from driftguard.store.database import Database
from driftguard.store.examination_evidence import scores_of
from driftguard.store.job_queue import deferring_connector
from driftguard.store.tables import ServingScoresRow
from tests.retraining.conftest import Drifted
from tests.retraining.engine_stub import EngineStub
from tests.retraining.world import (
    NEW,
    Models,
    drift,
    incident_of,
    make_settings,
    record,
    requests_of,
    store,
)
from tests.training.small_models import small_model, write_traffic

REQUESTS, K = 60, 4
CHANGED_AT = datetime.now(UTC) - timedelta(minutes=5)


def never() -> bool:
    return False


@pytest.fixture
def served(database: Database, engine: EngineStub, models: Models, tmp_path: Path) -> Drifted:
    """The new segment's requests: before the change the server accepted what its models account for, since
    then half of it."""
    version = model_version(models.draft)
    file = tmp_path / "served.jsonl"
    requests = requests_of(
        write_traffic(file, small_model(1), requests=2 * REQUESTS, seed=5, output_tokens=40)
    )
    expected = accounted(models, requests)
    before, after = slice(REQUESTS), slice(REQUESTS, 2 * REQUESTS)
    serve(database, version, requests[before], expected[before], CHANGED_AT - timedelta(minutes=1), 1.0)
    incident_id = drift(database, version, CHANGED_AT)
    serve(database, version, requests[after], expected[after], CHANGED_AT + timedelta(seconds=1), 0.5)
    with database.session() as session:
        later = (
            "UPDATE incidents SET change_point_seq = change_point_seq + :n, opened_seq = opened_seq + 2 * :n"
        )
        session.execute(text(later), {"n": REQUESTS})
    diagnosing.refresh(database, NOBODY, datetime.now(UTC))  # knows of the captures from here on
    return Drifted(database, make_settings(tmp_path / "data", engine.url), incident_id, version)


def serve(
    database: Database,
    version: str,
    requests: Sequence[tuple[list[int], list[int]]],
    expected: Sequence[tuple[float, float]],
    at: datetime,
    share: float,
) -> None:
    """Captured requests with their records: what was accepted is this share of what is expected."""
    captured, records = [], []
    for (prompt, output), (drafted, accepted) in zip(requests, expected, strict=True):
        one = msgspec.structs.replace(
            record(version, NEW, 0.5, at),
            drafted=round(drafted * 100),
            accepted=round(accepted * 100 * share),
            steps=1_000,
            emitted=1_000,
            num_speculative_tokens=K,
        )
        records.append(one)
        captured.append(
            CapturedRequest(
                record_id=one.record_id,
                server=one.server,
                target=one.target,
                draft_version=version,
                captured_at=at,
                prompt_token_ids=prompt,
                output_token_ids=output,
                segment=NEW,
            )
        )
    store(database, records)
    with database.session() as session:
        insert_captures(session, captured, max_per_segment=1_000)


def accounted(models: Models, requests: list[tuple[list[int], list[int]]]) -> list[tuple[float, float]]:
    target = load_model(models.target, "target")
    asked = [ServedRequest("", prompt, output, 1.0, K) for prompt, output in requests]
    scored = [one.rejection for one in score_batch(target, load_draft(models.draft, target), asked)]
    return [(one.drafted, one.accepted_of_answer) for one in scored]


def scored(served: Drifted, settings: Settings | None = None) -> str:
    return serving_scores.score(served.database, settings or served.settings, served.incident_id, never)


def known(served: Drifted) -> tuple[ServingScores | None, MissingScores | None]:
    with served.database.session() as session:
        return scores_of(session, served.incident_id)


def test_an_engine_that_accepts_half_of_what_its_models_account_for_is_named_and_not_retrained_for(
    served: Drifted,
) -> None:
    assert scored(served) == "scored"
    scores, missing = known(served)
    assert scores is not None
    assert missing is None
    (of,) = scores.segments
    assert (of.segment, of.before.requests, of.after.requests) == (NEW, REQUESTS, REQUESTS)
    assert of.before.gap == pytest.approx(0.0, abs=0.01)
    assert of.after.gap == pytest.approx(-of.after.served, abs=0.01)
    assert abs(of.after.surprise - of.before.surprise) < 0.2
    assert list((served.settings.data_directory / "scoring").iterdir()) == []

    diagnosing.refresh(served.database, NOBODY, datetime.now(UTC))
    diagnosis = incident_of(served.database, served.incident_id).diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.confidence, diagnosis.retrain) == ("machine", "high", False)
    assert "serving gap" in [fact.about for fact in diagnosis.facts]


@pytest.mark.usefixtures("training_here")
def test_it_is_scored_once_until_there_are_many_more(served: Drifted) -> None:
    assert scored(served) == "scored"
    assert scored(served) == "not due"


@pytest.fixture
def queue(served: Drifted) -> Iterator[procrastinate.App]:
    app = procrastinate.App(connector=deferring_connector(served.database))
    app.add_tasks_from(RetrainingJobs(served.database, served.settings).blueprint, namespace=NAMESPACE)
    with app.open():
        yield app


def queued(database: Database) -> list[str]:
    with database.session() as session:
        names = session.scalars(text("SELECT task_name FROM procrastinate_jobs WHERE status = 'todo'"))
        return sorted(name.removeprefix(f"{NAMESPACE}:") for name in names)


def test_a_retraining_waits_until_the_scores_are_weighed(served: Drifted, queue: procrastinate.App) -> None:
    """Here they cannot be made, so that the traffic stays the likely cause."""
    make_it_look_like_drift(served.database, served.incident_id)
    jobs = RetrainingJobs(served.database, served.settings)
    jobs.defer_due(queue)
    jobs.defer_due(queue)
    assert queued(served.database) == ["score"]
    with served.database.session() as session:
        row = session.get(ServingScoresRow, served.incident_id)
        assert row is None
        stored.begin(session, served.incident_id, 2, datetime.now(UTC))
    jobs.defer_due(queue)
    assert queued(served.database) == ["score"]  # it runs
    with served.database.session() as session:
        stored.end(session, served.incident_id, datetime.now(UTC), missing="failed")
    jobs.defer_due(queue)
    assert queued(served.database) == ["score"]  # it has ended, and is not weighed yet
    make_it_look_like_drift(served.database, served.incident_id, scores=2)
    jobs.defer_due(queue)
    assert queued(served.database) == ["retrain", "score"]


def make_it_look_like_drift(database: Database, incident_id: UUID, scores: int = 0) -> None:
    with database.session() as session:
        session.execute(
            text(
                "UPDATE incidents SET diagnosis = diagnosis || jsonb_build_object('cause', 'query_drift', "
                "'confidence', 'medium', 'retrain', true, 'seen', diagnosis->'seen' || "
                "jsonb_build_object('scores', CAST(:scores AS int))) WHERE id = :id"
            ),
            {"id": incident_id, "scores": scores},
        )


def test_it_can_be_switched_off(served: Drifted, queue: procrastinate.App) -> None:
    make_it_look_like_drift(served.database, served.incident_id)
    off = served.settings.diagnosis.model_copy(update={"score_captures": False})
    settings = served.settings.model_copy(update={"diagnosis": off})
    RetrainingJobs(served.database, settings).defer_due(queue)
    assert queued(served.database) == ["retrain"]


def test_a_server_without_a_registered_engine_is_told(served: Drifted) -> None:
    scored(served, served.settings.model_copy(update={"engines": []}))
    assert known(served) == (None, "not_registered")


def restarted(served: Drifted, models: Models, rule: str | None) -> Settings:
    """Of a server that is promoted by a restart, whose rule only the settings can tell."""
    described = EngineSettings(
        server="engine-1",
        target_directory=models.target,
        draft_directory=models.draft,
        num_speculative_tokens=K,
        acceptance_rule=rule,
    )
    return served.settings.model_copy(update={"engines": [described]})


@pytest.mark.usefixtures("training_here")
@pytest.mark.parametrize("rule", ["rejection", "match", None])
def test_a_server_is_scored_by_the_rule_that_the_settings_name_or_else_by_both(
    served: Drifted, models: Models, rule: str | None
) -> None:
    assert scored(served, restarted(served, models, rule)) == "scored"
    scores, _ = known(served)
    assert scores is not None
    by_rejection = scores.segments[0].before.gap == pytest.approx(0.0, abs=0.01)
    assert by_rejection == (rule != "match")  # it is what the records were made by
    assert bool(scores.by_match) == (rule is None)
    if rule is None:
        assert abs(scores.by_match[0].before.gap) > 0.02


def test_typical_acceptance_is_not_scored(served: Drifted, models: Models) -> None:
    scored(served, restarted(served, models, "typical"))
    assert known(served) == (None, "typical")


@pytest.mark.usefixtures("training_here")
def test_a_head_is_scored_for_the_built_in_engine_alone(
    served: Drifted, engine: EngineStub, models: Models
) -> None:
    with served.database.session() as session:
        session.execute(text("UPDATE streams SET method = 'eagle3'"))
    scored(served, restarted(served, models, "match"))
    assert known(served) == (None, "no_draft_model")
    with served.database.session() as session:
        stored.take_back(session, served.incident_id)
    assert scored(served) == "scored"


def test_an_engine_that_does_not_answer_is_told(served: Drifted) -> None:
    scored(served, make_settings(served.settings.data_dir, "http://127.0.0.1:9"))
    assert known(served) == (None, "engine_silent")


@pytest.mark.parametrize("path", ["/models/on/another/machine", f"/root/{'x' * 256}"])
def test_a_model_that_is_not_here_or_may_not_be_read_is_told(
    served: Drifted, engine: EngineStub, path: str
) -> None:
    """The second stands for one that this user may not look at: with root's rights its name has to be one
    that cannot be."""
    engine.target = Path(path)
    told = scored(served)
    assert told == f"the directory of the target, {path}, is not on this machine, or may not be read"
    assert known(served) == (None, "not_here")


def test_without_torch_it_is_told_that_it_is_not_here(
    served: Drifted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said that the scoring process had failed."""
    monkeypatch.setattr(candidate_kind, "find_spec", lambda _: None)
    assert scored(served) == "torch is not installed beside this sidecar"
    assert known(served) == (None, "not_here")


def test_a_draft_version_that_nobody_knows_is_told(served: Drifted, engine: EngineStub) -> None:
    engine.serving = {**engine.serving, "version": "other"}
    engine.loaded = {}
    assert scored(served) == "the directory of the draft is not known"
    assert known(served) == (None, "not_here")


def test_models_that_cannot_be_loaded_are_told_and_the_incident_says_so(
    served: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    engine.target = tmp_path
    scored(served)
    assert known(served) == (None, "failed")
    diagnosing.refresh(served.database, NOBODY, datetime.now(UTC))
    diagnosis = incident_of(served.database, served.incident_id).diagnosis
    assert diagnosis is not None
    assert any("the scoring process failed" in one for one in diagnosis.missing)


def test_captures_whose_records_tell_neither_k_nor_counts_per_position_are_too_few(served: Drifted) -> None:
    with served.database.session() as session:
        session.execute(text("UPDATE records SET num_speculative_tokens = NULL"))
    scored(served)
    assert known(served) == (None, "too_few")


def test_a_deadline_ends_it_with_what_it_has(served: Drifted, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> Iterator[process.Scored]:
        by = Expected(40.0, 20.0, 20.0)
        yield from (process.Scored(number, by, by, 0.0, 10) for number in range(done))
        raise process.TrainingStopped("stopped on request")

    monkeypatch.setattr(process, "score", slow)
    done = 12
    scored(served)
    assert known(served) == (None, "timeout")
    with served.database.session() as session:
        stored.take_back(session, served.incident_id)
    done = 50  # the newest of both sides come first
    assert scored(served) == "scored"
    scores, _ = known(served)
    assert scores is not None
    assert (scores.segments[0].before.requests, scores.segments[0].after.requests) == (25, 25)


def test_one_that_is_stopped_with_the_sidecar_is_due_again(served: Drifted) -> None:
    settings = served.settings
    stopped = serving_scores.score(served.database, settings, served.incident_id, lambda: True)
    assert stopped == "stopped"
    assert list((settings.data_directory / "scoring").iterdir()) == []
    assert scored(served) == "scored"


def test_one_that_was_killed_with_the_sidecar_is_given_up_and_its_files_are_removed(served: Drifted) -> None:
    longest = timedelta(seconds=served.settings.diagnosis.score_seconds) + serving_scores.ENDING
    directory = served.settings.data_directory / "scoring" / str(served.incident_id)
    directory.mkdir(parents=True)
    with served.database.session() as session:
        stored.begin(session, served.incident_id, 2, datetime.now(UTC) - longest / 2)
    serving_scores.give_up_killed(served.database, served.settings)
    assert known(served) == (None, None)  # it may still run
    assert directory.exists()
    with served.database.session() as session:
        session.execute(text("UPDATE serving_scores SET started_at = started_at - interval '1 hour'"))
    old = (datetime.now(UTC) - 2 * longest).timestamp()
    os.utime(directory, (old, old))
    serving_scores.give_up_killed(served.database, served.settings)
    assert known(served) == (None, "interrupted")
    assert not directory.exists()
    assert scored(served) == "not due"


def test_the_look_for_what_is_due_gives_a_killed_scoring_up(
    served: Drifted, queue: procrastinate.App
) -> None:
    longest = timedelta(seconds=served.settings.diagnosis.score_seconds) + serving_scores.ENDING
    with served.database.session() as session:
        stored.begin(session, served.incident_id, 2, datetime.now(UTC) - 2 * longest)
    RetrainingJobs(served.database, served.settings).defer_due(queue)
    assert known(served) == (None, "interrupted")
