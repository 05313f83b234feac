"""Gauges that mirror the database: what an alert is made of appears with its cause and goes with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import cast
from uuid import uuid4

import pytest
from prometheus_client.samples import Sample
from sqlalchemy import select, update

from driftguard.metrics import Metrics
from driftguard.metrics.labels import RUN_OUTCOMES
from driftguard.pipeline.look_around import LookAround
from driftguard.records.documents.incident import IncidentEvidence
from driftguard.status import gauges
from driftguard.store import incidents, retrain_runs
from driftguard.store.database import Database
from driftguard.store.retrain_runs import RunState
from driftguard.store.tables import Incident, Notification, RetrainRun, Stream
from tests.alerting.incident_rows import add_incident, add_stream, resolve
from tests.many_streams import populate

STREAM = {"server": "chat", "target": "target", "draft_version": "v1", "method": "draft_model"}
FALL = {**STREAM, "direction": "down", "severity": "critical"}
PLACE = {"server": "chat", "target": "target"}
NOW = datetime.now(UTC)


@pytest.fixture
def looking(database: Database) -> LookAround:
    return LookAround(database, Metrics())


def shown(looking: LookAround, name: str, **labels: str) -> float | None:
    looking.look(NOW)
    return looking._metrics.registry.get_sample_value(f"driftguard_{name}", labels)


def add_run(database: Database, state: str, minutes_ago: float, trigger: str = "nightly") -> None:
    at = NOW - timedelta(minutes=minutes_ago)
    with database.session() as session:
        retrain_runs.begin(
            session,
            RetrainRun(
                id=uuid4(),
                **PLACE,
                trigger=trigger,
                state=state,
                started_at=at - timedelta(minutes=1),
                ended_at=None if state in ("watching", "training") else at,
            ),
        )


def last_outcomes(looking: LookAround) -> set[str]:
    return {
        outcome
        for outcome in RUN_OUTCOMES
        if shown(looking, "retrain_last_run_outcome", **PLACE, outcome=outcome)
    }


def test_an_open_incident_is_shown_with_where_since_when_and_what_it_costs(
    database: Database, looking: LookAround
) -> None:
    incident_id = add_incident(database, [], opened_at=NOW)
    assert (
        shown(looking, "incident_acceptance_before_ratio", **FALL, segment="german", positions="all") == 0.74
    )
    assert (
        shown(looking, "incident_acceptance_after_ratio", **FALL, segment="german", positions="all") == 0.58
    )
    assert shown(looking, "incident_slowdown_ratio", **FALL) == 0.23
    since = (NOW - timedelta(minutes=5)).timestamp()
    assert shown(looking, "incident_change_point_timestamp_seconds", **FALL) == since
    identity = {"incident": str(incident_id), "cause": "unknown", "confidence": "low"}
    assert shown(looking, "incident_info", **FALL, **identity) == 1


def test_a_segment_that_is_back_before_the_others_is_not_shown_as_fallen(
    database: Database, looking: LookAround
) -> None:
    """Nor one whose place another name took: the alert about it ends."""
    incident_id = add_incident(database, [], opened_at=NOW)
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        (german,) = incident.segments
        incident.segments = (replace(german, back_at=NOW), replace(german, segment="french"))
    looking.look(NOW)
    for side in ("before", "after"):
        told = samples(looking._metrics, f"driftguard_incident_acceptance_{side}_ratio")
        assert [one.labels["segment"] for one in told] == ["french"]


def test_a_stream_that_appears_while_the_gauges_are_set_waits_for_the_next_round(database: Database) -> None:
    add_incident(database, [], opened_at=NOW)
    metrics = Metrics()
    with database.session() as session:
        gauges.refresh(session, metrics, [], [], [], NOW)  # what was read before it appeared
    assert metrics.registry.get_sample_value("driftguard_incident_slowdown_ratio", FALL) is None


def test_notifications_are_owed_until_taken_and_only_to_places_still_in_the_settings(
    database: Database,
) -> None:
    looking = LookAround(database, Metrics(), ["webhook:here"])
    incident_id = add_incident(database, ["webhook:here", "webhook:removed"])
    assert shown(looking, "notifications_undelivered") == 1
    resolve(database, incident_id)
    assert shown(looking, "notifications_undelivered") == 2
    taken = (Notification.event == "resolved") & (Notification.destination == "webhook:here")
    with database.session() as session:
        session.execute(update(Notification).where(taken).values(delivered_at=NOW))
    assert shown(looking, "notifications_undelivered") == 0


def test_an_incident_of_unknown_cost_shows_none(database: Database, looking: LookAround) -> None:
    incident_id = add_incident(database, [])
    with database.session() as session:
        session.execute(
            update(Incident).where(Incident.id == incident_id).values(evidence=IncidentEvidence())
        )
    assert shown(looking, "incident_slowdown_ratio", **FALL) is None
    assert (
        shown(looking, "incident_acceptance_after_ratio", **FALL, segment="german", positions="all") == 0.58
    )


def test_what_became_graver_or_ended_is_shown_as_such_and_no_longer_as_before(
    database: Database, looking: LookAround
) -> None:
    incident_id = add_incident(database, [], severity="warning")
    warning = {**FALL, "severity": "warning"}
    assert (
        shown(looking, "incident_acceptance_after_ratio", **warning, segment="german", positions="all")
        == 0.58
    )
    with database.session() as session:
        incidents.find(session, incident_id)[0].severity = "critical"
    assert (
        shown(looking, "incident_acceptance_after_ratio", **FALL, segment="german", positions="all") == 0.58
    )
    assert (
        shown(looking, "incident_acceptance_after_ratio", **warning, segment="german", positions="all")
        is None
    )
    resolve(database, incident_id)
    assert (
        shown(looking, "incident_acceptance_after_ratio", **FALL, segment="german", positions="all") is None
    )
    assert shown(looking, "incident_change_point_timestamp_seconds", **FALL) is None
    assert shown(looking, "incidents_open", severity="critical", direction="down") == 0


def test_a_stream_shows_when_it_was_last_heard_and_the_gauges_when_they_were_last_set(
    database: Database, looking: LookAround
) -> None:
    stream_id = add_stream(database)
    assert shown(looking, "stream_last_arrival_timestamp_seconds", **STREAM) is None
    with database.session() as session:
        session.execute(update(Stream).where(Stream.id == stream_id).values(traffic_arrived_at=NOW))
    assert shown(looking, "stream_last_arrival_timestamp_seconds", **STREAM) == NOW.timestamp()
    assert shown(looking, "gauges_last_refresh_timestamp_seconds") == NOW.timestamp()


def test_the_first_failed_retraining_is_an_increase_of_its_counter(
    database: Database, looking: LookAround
) -> None:
    add_stream(database)
    assert shown(looking, "retrain_runs_total", **PLACE, outcome="failed") == 0
    add_run(database, "failed", 5)
    assert shown(looking, "retrain_runs_total", **PLACE, outcome="failed") == 1


def test_a_promotion_after_one_that_was_taken_back_by_hand_is_counted(
    database: Database, looking: LookAround
) -> None:
    """Of a server that restarts: the run that had promoted goes on, and ends as rolled back."""

    def counted() -> dict[str, float | None]:
        outcomes = ("promoted", "rolled_back")
        return {one: shown(looking, "retrain_runs_total", **PLACE, outcome=one) for one in outcomes}

    add_stream(database)
    add_run(database, "promoted", 40)
    add_run(database, "promoted", 30)
    assert counted() == {"promoted": 2, "rolled_back": 0}
    with database.session() as session:
        run = retrain_runs.list_page(session, limit=1)[0]
        before = {"ended_at": run.ended_at}
    for state, values in (("rolling_back", {"ended_at": None}), ("promoted", before)):  # refused
        with database.session() as session:
            retrain_runs.advance(session, run.id, cast("RunState", state), **values)
        assert counted() == {"promoted": 2, "rolled_back": 0}
    with database.session() as session:
        retrain_runs.advance(session, run.id, "rolling_back", ended_at=None)
    assert counted() == {"promoted": 2, "rolled_back": 0}
    with database.session() as session:
        retrain_runs.end(session, run.id, "rolled_back", "by hand", NOW - timedelta(minutes=10))
    assert counted() == {"promoted": 2, "rolled_back": 1}
    add_run(database, "promoted", 5)
    assert counted() == {"promoted": 3, "rolled_back": 1}


def test_the_last_outcome_is_that_of_the_run_that_ended_last(database: Database, looking: LookAround) -> None:
    add_stream(database)
    add_run(database, "failed", 30)
    assert last_outcomes(looking) == {"failed"}
    add_run(database, "training", 0)
    assert last_outcomes(looking) == {"failed"}
    add_run(database, "nothing_to_do", 10)
    assert last_outcomes(looking) == {"nothing_to_do"}
    add_run(database, "watching", 20)
    assert last_outcomes(looking) == set()


def test_rejections_are_counted_from_the_last_draft_that_was_put_into_service(
    database: Database, looking: LookAround
) -> None:
    add_stream(database)
    for minutes_ago, state in ((60, "rejected"), (50, "promoted"), (40, "rejected"), (30, "failed")):
        add_run(database, state, minutes_ago)
    assert shown(looking, "retrain_rejected_in_a_row", **PLACE) == 1
    add_run(database, "rejected", 20)
    assert shown(looking, "retrain_rejected_in_a_row", **PLACE) == 2
    add_run(database, "watching", 10)
    assert shown(looking, "retrain_rejected_in_a_row", **PLACE) == 0


def test_the_nightly_job_has_a_time_of_its_own(database: Database, looking: LookAround) -> None:
    add_stream(database)
    add_run(database, "rejected", 300)
    add_run(database, "nothing_to_do", 5, trigger="incident")
    at = shown(looking, "retrain_last_run_timestamp_seconds", **PLACE, trigger="nightly")
    assert at == (NOW - timedelta(minutes=300)).timestamp()


def test_the_worst_streams_have_gauges_of_their_own_and_the_others_are_counted(database: Database) -> None:
    """Half of the forty are silent."""
    populate(database, 40, minutes_apart=10)
    with database.session() as session:
        ids = {stream.server: stream.id for stream in session.scalars(select(Stream))}
    for server in ("server-8", "server-9"):  # one that is not silent, and one that is
        add_incident(database, [], stream_id=ids[server], opened_at=NOW)
    metrics = Metrics(max_streams=10)
    LookAround(database, metrics).look(datetime.now(UTC))
    verdicts = [sample.labels for sample in samples(metrics, "driftguard_stream_verdict")]
    assert len(verdicts) == 10
    shown_now = Counter(item["verdict"] for item in verdicts)
    assert shown_now == {"degraded": 1, "stale": 4, "steady": 5}  # what goes on is seen beside an outage
    assert "server-8" in {item["server"] for item in verdicts}
    told = {sample.labels["server"] for sample in samples(metrics, "driftguard_incident_info")}
    assert told == {"server-8", "server-9"}  # whatever the limit
    counts = {item.labels["verdict"]: item.value for item in samples(metrics, "driftguard_streams")}
    found = {verdict: count for verdict, count in counts.items() if count}
    assert found == {"degraded": 1, "stale": 20, "steady": 19}
    (left_out,) = [
        sample.value
        for sample in samples(metrics, "driftguard_metrics_streams_left_out")
        if sample.labels == {"series": "gauges"}
    ]
    assert left_out == 30


def test_every_degraded_stream_has_gauges_of_its_own(database: Database) -> None:
    populate(database, 20, minutes_apart=10)
    with database.session() as session:
        ids = {stream.server: stream.id for stream in session.scalars(select(Stream))}
    for server in ("server-8", "server-10"):
        add_incident(database, [], stream_id=ids[server], opened_at=NOW)
    metrics = Metrics(max_streams=1)
    LookAround(database, metrics).look(datetime.now(UTC))
    shown_now = {sample.labels["server"] for sample in samples(metrics, "driftguard_stream_verdict")}
    assert shown_now == {"server-8", "server-10"}


def samples(metrics: Metrics, name: str) -> list[Sample]:
    return [
        sample for metric in metrics.registry.collect() for sample in metric.samples if sample.name == name
    ]
