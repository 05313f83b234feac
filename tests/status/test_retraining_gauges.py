"""Gauges of drafts, retraining and speed follow the database, which other processes change too."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import msgspec
import pytest

from driftguard.cost import Cost
from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.pipeline.look_around import LookAround
from driftguard.records.documents.cost import Choice, Interval, Speed
from driftguard.records.documents.retraining_run import Costs, Decision, GateRules, RunNumbers
from driftguard.retraining.training.gate import DraftScores, GroupScores, decide
from driftguard.store import drafts, retrain_runs, stream_costs, streams
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun
from tests.alerting.incident_rows import add_incident, add_stream
from tests.pipeline.traffic import Traffic, store

PLACE = {"server": "chat", "target": "target"}
STREAM = {**PLACE, "draft_version": "v1", "method": "draft_model"}
NOW = datetime.now(UTC)


@pytest.fixture
def looking(database: Database) -> LookAround:
    return LookAround(database, Metrics())


def shown(looking: LookAround, name: str, **labels: str) -> float | None:
    looking.look(NOW)
    return looking._metrics.registry.get_sample_value(f"driftguard_{name}", labels)


def add_run(database: Database, state: str, minutes_ago: float, decision: Decision | None = None) -> None:
    at = NOW - timedelta(minutes=minutes_ago)
    with database.session() as session:
        run = RetrainRun(
            id=uuid4(),
            **PLACE,
            trigger="nightly",
            state=state,
            started_at=at,
            ended_at=at if state in retrain_runs.ENDED_STATES else None,
            numbers=RunNumbers(gate=decision) if decision else None,
        )
        retrain_runs.begin(session, run)


def serve(database: Database, version: str, at: datetime, former: drafts.DraftState = "retired") -> None:
    with database.session() as session:
        drafts.put_in_service(
            session,
            server="chat",
            target="target",
            version=version,
            name="draft",
            method="draft_model",
            directory=None,
            at=at,
            former=former,
        )


def scores(kept: float, noise: list[float], accepted: float) -> DraftScores:
    return DraftScores([kept + x for x in noise], [100.0] * len(noise), [accepted] * len(noise), 2_000.0)


def decided(german: float, code: float) -> Decision:
    """A candidate of which so many single draft tokens are kept, where it is .5 and .8 of the draft in
    service. Of 100 draft tokens of a request of german 25 are accepted, and 50 with the candidate."""
    noise = [-0.05, 0.05] * 20
    groups = [
        GroupScores("german", True, 4_000, scores(0.5, noise, 25.0), scores(german, noise[::-1], 50.0)),
        GroupScores("code", False, 4_000, scores(0.8, noise, 50.0), scores(code, noise, 50.0)),
    ]
    return decide(groups, Costs(4, 0.01, 0.001, 0.001), GateRules(0.02, 0.02))


def test_a_draft_in_service_is_shown_until_another_takes_its_place(
    database: Database, looking: LookAround
) -> None:
    name = "draft_in_service_since_timestamp_seconds"
    earlier = NOW - timedelta(hours=2)
    serve(database, "v1", earlier)
    assert shown(looking, name, **PLACE, draft_version="v1") == earlier.timestamp()
    serve(database, "v2", NOW, former="rolled_back")
    assert shown(looking, name, **PLACE, draft_version="v1") is None
    assert shown(looking, name, **PLACE, draft_version="v2") == NOW.timestamp()
    assert shown(looking, "drafts", **PLACE, state="in_service") == 1
    assert shown(looking, "drafts", **PLACE, state="rolled_back") == 1


def test_a_draft_that_its_engine_lost_is_shown_until_another_is_put_into_service(
    database: Database, looking: LookAround
) -> None:
    serve(database, "v2", NOW - timedelta(hours=2))
    serve(database, "v1", NOW, former="lost")
    serve(database, "v1", NOW)
    assert shown(looking, "drafts", **PLACE, state="lost") == 1
    serve(database, "v3", NOW)
    assert shown(looking, "drafts", **PLACE, state="lost") is None


def test_the_stage_of_a_running_retraining_is_shown_and_none_when_it_has_ended(
    database: Database, looking: LookAround
) -> None:
    add_stream(database)
    assert shown(looking, "retrain_stage", **PLACE, stage="training") is None
    add_run(database, "training", 1)
    assert shown(looking, "retrain_stage", **PLACE, stage="training") == 1
    with database.session() as session:
        (run,) = retrain_runs.unended(session)
        retrain_runs.advance(session, run.id, "evaluating")
    assert shown(looking, "retrain_stage", **PLACE, stage="training") is None
    assert shown(looking, "retrain_stage", **PLACE, stage="evaluating") == 1
    with database.session() as session:
        retrain_runs.end(session, run.id, "failed", "the test ends it", NOW)
    assert shown(looking, "retrain_stage", **PLACE, stage="evaluating") is None


def test_the_gate_shows_what_its_newest_decision_was_made_on(database: Database, looking: LookAround) -> None:
    assert shown(looking, "gate_passed", **PLACE) is None
    add_run(database, "rejected", 60, decided(german=0.6, code=0.7))
    assert shown(looking, "gate_passed", **PLACE) == 0
    assert shown(looking, "gate_loss_upper_ratio", **PLACE) == pytest.approx(0.1, abs=0.01)
    add_run(database, "promoted", 30, decided(german=0.7, code=0.81))
    add_run(database, "nothing_to_do", 5)
    assert shown(looking, "gate_passed", **PLACE) == 1
    assert shown(looking, "gate_acceptance_ratio", **PLACE, draft="in_service") == 0.25
    assert shown(looking, "gate_acceptance_ratio", **PLACE, draft="candidate") == 0.5
    gain = shown(looking, "gate_gain_lower_ratio", **PLACE)
    assert gain is not None
    assert 0.15 < gain < 0.2
    assert shown(looking, "gate_loss_upper_ratio", **PLACE) == pytest.approx(-0.01)


def test_a_verdict_shows_since_when_it_holds(database: Database, looking: LookAround) -> None:
    add_incident(database, [], opened_at=NOW)
    since = (NOW - timedelta(minutes=5)).timestamp()
    assert shown(looking, "stream_verdict_since_timestamp_seconds", **STREAM) == since


def test_a_stream_shows_its_speed_and_the_best_k_while_that_is_known(
    database: Database, looking: LookAround
) -> None:
    store(database, Traffic(seed=1, start=NOW - timedelta(seconds=90)).draw(60, {"code": 0.75}))
    speed = Speed(40.0, 0.025, 3.0, 0.075, 500)
    choice = Choice(3, 2.8, 0.05, 42.0, Interval(0.05, 0.0, 0.1), measured=True)
    cost = Cost(
        speed,
        num_speculative_tokens=4,
        choices=(choice,),
        best=3,
        break_even_acceptance=Interval(0.4, 0.35, 0.45),
    )
    for measured_at, known in ((NOW, (4, 3, 0.4)), (NOW - timedelta(days=1), (None, None, None))):
        with database.session() as session:
            (stream,) = streams.all_streams(session)
            stream_costs.store(session, stream.id, msgspec.to_builtins(cost), measured_at)
        names = ("num_speculative_tokens", "best_num_speculative_tokens", "break_even_acceptance_ratio")
        assert tuple(shown(looking, f"stream_{name}", **STREAM) for name in names) == known
    Pipeline(database, DetectorConfig(), Metrics()).fold_batch()
    assert shown(looking, "stream_tokens_per_second", **STREAM, period="now") == pytest.approx(80, rel=0.05)
