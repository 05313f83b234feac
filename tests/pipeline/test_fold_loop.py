"""The detector loop on a real database: what opens, what closes, and what a failure leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, or_, select, text, update
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from driftguard.detection import DetectorConfig, Finding
from driftguard.errors import DatabaseUnavailable
from driftguard.incident_lifecycle import State
from driftguard.incidents import cost_measurement
from driftguard.incidents.examination import Examiner
from driftguard.incidents.message import summary
from driftguard.incidents.opening import NOBODY
from driftguard.metrics import Metrics
from driftguard.pipeline import held, look_around
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.pipeline.look_around import LookAround
from driftguard.records.documents.incident import names_of
from driftguard.store import folding, incidents
from driftguard.store.database import FOLD, Database, DatabaseTimeout
from driftguard.store.folding import StoredRecord, read_after
from driftguard.store.tables import DetectorState, Incident, Notification, Record, Stream
from tests.alerting.http_receiver import wait_until
from tests.pipeline.examining import fold_and_examine
from tests.pipeline.traffic import Traffic, store

CONFIG = DetectorConfig(minimum_drop=0.1)
GOOD = {"code": 0.75, "english": 0.7, "german": 0.7}
BAD = {**GOOD, "german": 0.35}


def fold_all(pipeline: Pipeline) -> None:
    while pipeline.fold_batch():
        pass


def new_pipeline(database: Database, *, batch_records: int = 200) -> Pipeline:
    return Pipeline(database, CONFIG, Metrics(), batch_records=batch_records)


def all_incidents(database: Database) -> list[Incident]:
    with database.session() as session:
        return list(session.scalars(select(Incident).order_by(Incident.opened_seq)))


def test_a_fall_in_one_segment_opens_one_incident_that_says_where_since_when_and_how_bad(
    database: Database,
) -> None:
    traffic = Traffic(seed=1)
    store(database, traffic.draw(1500, GOOD))
    changed_at = traffic.clock
    store(database, traffic.draw(300, BAD))
    fold_and_examine(new_pipeline(database), database)

    (incident,) = all_incidents(database)
    assert (incident.state, incident.direction) == ("open", "down")
    assert names_of(incident.segments) == ("german",)
    assert abs((incident.change_point_at - changed_at).total_seconds()) < 60
    assert incident.interval_start_at <= incident.change_point_at <= incident.interval_end_at
    (segment,) = incident.segments
    assert segment.before.rate == pytest.approx(0.7, abs=0.03)
    assert segment.after.rate == pytest.approx(0.35, abs=0.06)
    # Answers are shorter where less is accepted, for which the adjusted levels allow: both are told.
    adjusted = incident.evidence.adjusted
    assert adjusted is not None
    assert (incident.acceptance_before, incident.acceptance_after) == (adjusted.before, adjusted.after)
    assert 0.25 < adjusted.before - adjusted.after < 0.35
    assert adjusted.because == ("answers are shorter",)
    with database.session() as session:
        stream = session.scalars(select(Stream)).one()
        assert "Plain counts say 0.70 to 0.3" in summary(incident, stream)
    # Emitted per step falls from about 1 + 4 x 0.7 to 1 + 4 x 0.35, and a step takes as long as before.
    assert incident.tokens_per_second_before is not None
    assert incident.tokens_per_second_after is not None
    assert incident.tokens_per_second_after / incident.tokens_per_second_before == pytest.approx(
        2.4 / 3.8, abs=0.06
    )
    assert incident.severity == "critical"
    with database.session() as session:
        (notification,) = session.scalars(select(Notification))
        assert (notification.event, notification.destination) == ("firing", "webhook:http://pager")


def test_a_change_of_the_mix_alone_opens_nothing(database: Database) -> None:
    traffic = Traffic(seed=2)
    store(database, traffic.draw(1500, {"code": 0.85, "german": 0.45}))
    store(database, traffic.draw(600, {"german": 0.45}))
    fold_and_examine(new_pipeline(database), database)
    assert all_incidents(database) == []


def test_a_rise_is_an_incident_but_pages_nobody(database: Database) -> None:
    traffic = Traffic(seed=3)
    store(database, traffic.draw(1500, GOOD))
    store(database, traffic.draw(300, {**GOOD, "german": 0.95}))
    fold_and_examine(new_pipeline(database), database)
    (incident,) = all_incidents(database)
    assert (incident.direction, incident.severity) == ("up", "info")
    with database.session() as session:
        assert session.scalars(select(Notification)).all() == []


def test_recovery_resolves_the_incident_and_announces_it_where_it_was_announced(database: Database) -> None:
    traffic = Traffic(seed=4)
    pipeline = new_pipeline(database)
    store(database, traffic.draw(1500, GOOD) + traffic.draw(300, BAD))
    fold_and_examine(pipeline, database)
    store(database, traffic.draw(1200, GOOD))
    fold_and_examine(pipeline, database)
    (incident,) = all_incidents(database)
    assert incident.state == "resolved"
    assert incident.resolution is not None
    assert "german" in incident.resolution
    with database.session() as session:
        events = session.scalars(select(Notification.event).order_by(Notification.id)).all()
        steps = [(row.from_state, row.to_state) for row in incidents.transitions(session, incident.id)]
    assert events == ["firing", "resolved"]
    assert steps == [(None, "open"), ("open", "resolved")]


def test_a_batch_that_the_database_takes_too_long_for_is_followed_by_smaller_ones(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = Traffic(seed=13)
    store(database, traffic.draw(300, GOOD))

    def slow(session: Session, position: int, *, limit: int) -> list[StoredRecord]:
        if limit > 60:
            session.execute(text("SET LOCAL statement_timeout = '100ms'"))
            session.execute(text("SELECT pg_sleep(60)"))
        return read_after(session, position, limit=limit)

    monkeypatch.setattr("driftguard.pipeline.fold_loop.read_after", slow)
    pipeline = new_pipeline(database, batch_records=200)
    pipeline.start()
    try:
        wait_until(lambda: lag(database) == 0, "all records to be folded")
    finally:
        pipeline.stop()


def lag(database: Database) -> int:
    with database.session() as session:
        return folding.unfolded(session)


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (DatabaseUnavailable("connection refused"), 0),
        (DatabaseTimeout("no answer", FOLD, "silence"), 0),
        (DatabaseTimeout("a statement was cancelled", FOLD, "statement"), 1),
        (RuntimeError("a batch that cannot be folded"), 1),
    ],
)
def test_only_what_fails_although_the_database_answers_is_a_failure_of_the_fold(
    database: Database, error: Exception, counted: int
) -> None:
    metrics = Metrics()
    Pipeline(database, CONFIG, metrics)._report(error)
    assert metrics.registry.get_sample_value("driftguard_fold_failures_total") == counted


def test_canary_probes_are_not_folded(database: Database) -> None:
    traffic = Traffic(seed=5)
    store(database, traffic.draw(1500, GOOD))
    store(database, traffic.draw(300, BAD, kind="probe"))
    pipeline = new_pipeline(database)
    fold_all(pipeline)
    assert all_incidents(database) == []
    with database.session() as session:
        assert folding.unfolded(session) == 0
        summary = session.scalars(select(DetectorState.summary)).one()
    assert summary["requests"] == 1500


def test_what_a_person_resolved_is_over_for_the_detector_too(database: Database) -> None:
    traffic = Traffic(seed=6)
    pipeline = new_pipeline(database)
    store(database, traffic.draw(1500, GOOD) + traffic.draw(300, BAD))
    fold_all(pipeline)
    (first,) = all_incidents(database)
    with database.session() as session:
        incidents.move(session, first.id, "resolved", "expected: a new tenant", datetime.now(UTC))
    store(database, traffic.draw(300, BAD))
    fold_all(pipeline)
    found = all_incidents(database)
    assert [incident.state for incident in found] == ["resolved", "open"]  # it is still bad: a new incident


@pytest.mark.parametrize("state", ["open", "mitigating", "recovered_in_part"])
def test_an_incident_of_a_draft_that_is_gone_ends_unless_a_promotion_is_being_watched(
    database: Database, state: State
) -> None:
    traffic = Traffic(seed=12)
    pipeline = new_pipeline(database)
    store(database, traffic.draw(1500, GOOD) + traffic.draw(300, BAD))
    store(database, traffic.draw(400, GOOD, draft_version="v2"))
    fold_and_examine(pipeline, database)  # the fall does not go on with v2
    (incident,) = all_incidents(database)
    if state != "open":
        with database.session() as session:
            incidents.move(session, incident.id, state, "retraining", datetime.now(UTC))
    now = datetime.now(UTC)
    seen = update(Stream).where(Stream.draft_version == "v1")
    with database.session() as session:
        session.execute(seen.values(last_seen_at=now - timedelta(minutes=10)))
    LookAround(database, Metrics()).look(now)
    assert all_incidents(database)[0].state == state  # it may only be quiet
    with database.session() as session:
        session.execute(seen.values(last_seen_at=now - timedelta(minutes=20)))
    LookAround(database, Metrics()).look(now)
    assert all_incidents(database)[0].state == ("resolved" if state == "open" else state)


def test_two_sidecars_take_turns_and_end_where_one_would(database: Database) -> None:
    records = Traffic(seed=7).draw(1500, GOOD) + Traffic(seed=8).draw(400, BAD)
    store(database, records)
    pipelines = [new_pipeline(database, batch_records=50) for _ in range(2)]
    threads = [threading.Thread(target=fold_all, args=(pipeline,)) for pipeline in pipelines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.session() as session:
        both = session.scalars(select(DetectorState.state)).one()
        opened = session.scalars(select(Incident.id)).all()
        for table in ("incidents", "detector_states", "fold_positions"):
            session.execute(text(f"DELETE FROM {table}"))
    fold_all(new_pipeline(database, batch_records=5000))
    with database.session() as session:
        assert session.scalars(select(DetectorState.state)).one() == both
        assert session.scalars(select(Incident.id)).all() == opened
    assert len(opened) == 1


def test_a_reader_that_fails_takes_what_its_stream_had_in_the_batch_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "RETRY_AFTER_SECONDS", (0.0,))
    store(database, Traffic(seed=9).draw(300, GOOD))
    calls: list[int] = []

    def failing_once(
        session: Session, stream: Stream, records: Sequence[StoredRecord], findings: Sequence[Finding]
    ) -> None:
        del session, stream, findings
        calls.append(len(records))
        if len(calls) == 1:
            raise RuntimeError("the reader failed")

    pipeline = Pipeline(database, CONFIG, Metrics(), after_fold=[failing_once])
    pipeline._fold_next()
    with database.session() as session:
        assert folding.unfolded(session) == 300
        assert session.scalars(select(DetectorState)).all() == []
    fold_all(pipeline)
    assert calls == [300, 300]


@pytest.mark.parametrize(
    ("stored", "reason", "counts"),
    [
        ("'nonsense'", "the stored detector state is damaged; baselines are relearned", (1, 0)),
        (
            "set_byte(state, 7, 200)",
            "stored by another version of DriftGuard; baselines are relearned",
            (0, 1),
        ),
    ],
)
def test_an_unreadable_state_begins_anew_and_a_fall_stays_open_until_it_is_over(
    database: Database, stored: str, reason: str, counts: tuple[int, int]
) -> None:
    """What the new state learns is the fallen level: it would neither page again nor see the end."""
    traffic = Traffic(seed=10)
    better = {**GOOD, "code": 0.95}
    store(database, traffic.draw(900, GOOD) + traffic.draw(400, better | {"german": 0.35}))
    fold_and_examine(new_pipeline(database), database)
    with database.session() as session:
        session.execute(text(f"UPDATE detector_states SET state = {stored}::bytea"))
    store(database, traffic.draw(60, better | {"german": 0.35}))
    metrics = Metrics()
    with capture_logs() as logs:
        fold_all(Pipeline(database, CONFIG, metrics))
    found = {incident.direction: incident for incident in all_incidents(database)}
    assert {each: incident.state for each, incident in found.items()} == {"down": "open", "up": "resolved"}
    assert (found["up"].resolution or "").startswith(reason)
    with database.session() as session:
        assert incidents.transitions(session, found["down"].id)[-1].reason.startswith(reason)
    cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
    assert {incident.state for incident in all_incidents(database)} == {"open", "resolved"}
    store(database, traffic.draw(400, GOOD))
    cost_measurement.refresh(database, NOBODY, datetime.now(UTC) + timedelta(minutes=20))
    assert [incident.state for incident in all_incidents(database)] == ["resolved", "resolved"]
    assert [line["log_level"] for line in logs if line["event"] == reason] == [
        "error" if counts == (1, 0) else "warning"
    ]
    told = metrics.exposition().decode()
    assert f"driftguard_detector_states_lost_total {counts[0]}.0" in told
    assert f"driftguard_detector_states_of_other_version_total {counts[1]}.0" in told


def test_an_incident_is_in_the_metrics_as_soon_as_it_is_stored_whenever_the_next_look_is_due(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus pages by them."""
    metrics, traffic = Metrics(), Traffic(seed=1)
    looking = LookAround(database, metrics)
    examiner = Examiner(database, metrics, minimum_drop=0.1, on_told=looking.soon)
    pipeline = Pipeline(database, CONFIG, metrics, on_found=examiner.soon)
    labels = {"severity": "critical", "direction": "down"}

    def opened() -> float | None:
        return metrics.registry.get_sample_value("driftguard_incidents_open", labels)

    store(database, traffic.draw(1500, {"code": 0.75}))
    monkeypatch.setattr(look_around, "LOOK_SECONDS", 1_000.0)  # by the clock it need not look again
    fold_all(pipeline)
    looking.start()
    examiner.start()
    try:
        wait_until(lambda: opened() == 0, "the first look")
        store(database, traffic.draw(300, {"code": 0.3}))
        fold_all(pipeline)
        wait_until(lambda: opened() == 1, "the gauge of the incident")
    finally:
        examiner.stop()
        looking.stop()


def test_a_change_that_turns_out_to_have_come_bit_by_bit_is_told_in_the_text_and_the_history(
    database: Database,
) -> None:
    """The sidecar is restarted in between. Nobody is paged again."""
    traffic = Traffic(seed=5, start=datetime.now(UTC) - timedelta(days=1), seconds_apart=10.0)
    good = traffic.draw(3000, {"chat": 0.75})
    began = traffic.clock
    fall = [traffic.draw(1, {"chat": 0.75 - 0.2 * step / 500})[0] for step in range(500)]
    ended = traffic.clock
    store(database, good + fall[:300])
    fold_and_examine(new_pipeline(database), database)
    (incident,) = all_incidents(database)
    assert incident.evidence.gradual is not None
    assert not incident.evidence.gradual.certain

    store(database, fall[300:] + traffic.draw(800, {"chat": 0.55}))
    fold_and_examine(new_pipeline(database), database)
    (incident,) = all_incidents(database)
    gradual = incident.evidence.gradual
    assert gradual is not None
    assert gradual.over
    assert gradual.interval[0] <= began <= gradual.interval[1]
    assert abs(gradual.until - ended) < 0.3 * (ended - began)
    assert gradual.moved == pytest.approx(-0.2, abs=0.03)
    with database.session() as session:
        stream = session.scalars(select(Stream)).one()
        text = summary(incident, stream)
        steps = [step.reason for step in incidents.transitions(session, incident.id)]
        pages = session.scalars(select(Notification)).all()
    assert "It fell bit by bit from about " in text
    assert gradual.text in steps
    assert len(pages) == 1


def test_a_segment_that_falls_while_another_is_down_joins_the_incident_and_its_history(
    database: Database,
) -> None:
    """The sidecar is restarted in between, and the second segment comes back alone."""
    traffic = Traffic(seed=3)
    store(database, traffic.draw(1500, GOOD) + traffic.draw(300, BAD))
    fold_and_examine(new_pipeline(database), database)
    (before,) = all_incidents(database)
    assert names_of(before.segments) == ("german",)

    store(database, traffic.draw(300, {**BAD, "english": 0.35}))
    fold_and_examine(new_pipeline(database), database)
    (incident,) = all_incidents(database)
    assert names_of(incident.segments) == ("german", "english")
    assert (incident.id, incident.state) == (before.id, "open")
    assert incident.acceptance_after == pytest.approx(0.35, abs=0.07)
    assert incident.evidence.slowdown_measured is None  # until all segments have been timed
    with database.session() as session:
        steps = [step.reason for step in incidents.transitions(session, incident.id)]
    assert len(steps) == 2
    assert "acceptance fell in more segments, since" in steps[1]
    assert "english from 0.7" in steps[1]

    store(database, traffic.draw(400, BAD))
    fold_all(new_pipeline(database))
    assert {each.state for each in all_incidents(database)} == {"open"}
    store(database, traffic.draw(600, GOOD))
    fold_all(new_pipeline(database))
    assert {each.state for each in all_incidents(database)} == {"resolved"}


def test_a_rise_that_has_become_the_norm_of_one_segment_goes_on_in_the_other(database: Database) -> None:
    traffic = Traffic(seed=6)
    high = {"code": 0.9, "english": 0.7}
    low = {"code": 0.6, "english": 0.5}

    def draw(count: int, rates: dict[str, float]) -> None:
        """Ten of code for each of english."""
        code = {"code": rates["code"]}
        for _ in range(count // 11):
            store(database, traffic.draw(10, code) + traffic.draw(1, {"english": rates["english"]}))

    draw(3_300, low)
    draw(6_600, high)
    pipeline = new_pipeline(database, batch_records=2_000)
    fold_and_examine(pipeline, database)
    (rise,) = all_incidents(database)
    assert rise.state == "open"
    assert {each.segment: each.back_at is not None for each in rise.segments} == {
        "code": True,
        "english": False,
    }
    with database.session() as session:
        steps = [step.reason for step in incidents.transitions(session, rise.id)]
    assert steps[-1].startswith("the rise has lasted, and is the baseline from now on: code 0.")
    assert steps[-1].endswith("; the rise goes on in english")
    draw(330, {**high, "code": 0.6})
    fold_and_examine(pipeline, database)
    fall = all_incidents(database)[-1]
    assert (fall.direction, names_of(fall.segments)) == ("down", ("code",))
    draw(2_200, low)
    fold_and_examine(pipeline, database)
    assert {each.direction: each.state for each in all_incidents(database)} == {
        "up": "resolved",
        "down": "open",
    }


def test_a_segment_that_is_back_falls_anew_while_another_is_not_back(database: Database) -> None:
    traffic = Traffic(seed=7)
    both, one = {**GOOD, "english": 0.4, "german": 0.4}, {**GOOD, "german": 0.4}
    pipeline = new_pipeline(database)
    store(database, traffic.draw(1500, GOOD) + traffic.draw(400, both) + traffic.draw(600, one))
    fold_and_examine(pipeline, database)
    (incident,) = all_incidents(database)
    assert {each.segment: each.back_at is not None for each in incident.segments} == {
        "english": True,
        "german": False,
    }
    again_at = traffic.clock
    store(database, traffic.draw(300, both))
    fold_and_examine(pipeline, database)
    (incident,) = all_incidents(database)
    assert {each.segment: each.back_at for each in incident.segments} == {"german": None, "english": None}
    with database.session() as session:
        stream = session.scalars(select(Stream)).one()
        steps = [step.reason for step in incidents.transitions(session, incident.id)]
        assert "It is over in" not in summary(incident, stream)
    assert steps[-2].startswith("acceptance is back at its baseline: english 0.")
    assert steps[-2].endswith("; german is not back yet")
    since = datetime.fromisoformat(steps[-1].split("since ")[1].split(" UTC")[0]).replace(tzinfo=UTC)
    assert "fell in more segments" in steps[-1]
    assert "english from 0.7" in steps[-1]
    assert abs((since - again_at).total_seconds()) < 60
    german, english = incident.segments
    assert german.since is None
    assert english.since is not None
    assert english.since.replace(microsecond=0) == since
    store(database, traffic.draw(900, GOOD))
    fold_and_examine(pipeline, database)
    (incident,) = all_incidents(database)
    assert incident.state == "resolved"
    assert incident.evidence.ending is not None
    of_change = [
        (Record.segment == each.segment)
        & Record.ended_at.between(each.since or incident.change_point_at, each.back_at)
        for each in incident.segments
    ]
    with database.session() as session:
        tokens = session.scalars(select(func.sum(Record.emitted)).where(or_(*of_change))).one()
    assert incident.evidence.ending.tokens == tokens


def test_the_last_of_64_segments_is_judged_by_itself_and_named(database: Database) -> None:
    """Beside 'other', in which the rest is stored."""
    traffic = Traffic(seed=5)
    for number in range(63):
        store(database, traffic.draw(1, {f"tenant {number}": 0.75}))
    store(database, traffic.draw(1500, {"last": 0.75, "beyond": 0.4}))
    store(database, traffic.draw(600, {"last": 0.4, "beyond": 0.4}))
    fold_and_examine(new_pipeline(database), database)
    (incident,) = all_incidents(database)
    assert names_of(incident.segments) == ("last",)
    assert incident.evidence.slowdown_measured is not None  # by its own requests
