"""What a resolved incident says: how long, how soon, what it cost; also where clocks lie and nobody knows."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pytest
from sqlalchemy import and_, delete, func, or_, select
from structlog.testing import capture_logs
from typer.testing import CliRunner

from driftguard.cli.main import app
from driftguard.detection import DetectorConfig, DriftClosed, SegmentChange
from driftguard.incidents import aftermath, opening
from driftguard.incidents.message import document, summary
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records.documents.cost import Cost, Interval, Speed
from driftguard.records.documents.goodput import GoodputChange, GoodputKind
from driftguard.records.documents.incident import Ending, Mitigation, changed_since
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Record, Rollup, Stream
from tests.alerting.incident_rows import add_incident, add_stream, resolve
from tests.cost.traffic import Server
from tests.incidents.test_cost_measurement import BAD, GOOD, START, fold_all, only_incident, records, send
from tests.pipeline.examining import fold_and_examine
from tests.pipeline.sidecar import running_sidecar
from tests.pipeline.traffic import store

NOW = datetime(2026, 11, 24, 12, 0, tzinfo=UTC)


def goodput(kind: GoodputKind, lost: float) -> GoodputChange:
    return GoodputChange(
        kind=kind,
        concurrency=(8, 16),
        lost=lost,
        requests=400,
        acceptance="none",
        false_alarm_days=365.0,
    )


def resolved(database: Database, incident_id: UUID, at: datetime, **more: Any) -> Incident:
    with database.session() as session:
        return incidents.move(session, incident_id, "resolved", "it is over", at, **more)


def test_an_incident_that_ended_by_itself_says_how_long_and_what_it_cost(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found, measured and closed by the real pipeline; the tokens are those of the records."""
    rng = np.random.default_rng(1)
    send(database, rng, GOOD, 0, {4: 1200})
    send(database, rng, BAD, 40, {4: 300})
    fold_all(database)
    send(database, rng, GOOD, 60, {4: 400})
    with capture_logs() as logs:
        fold_all(database)
    incident, stream = only_incident(database)
    assert incident.state == "resolved"
    (logged,) = [line for line in logs if line["event"] == "incident resolved"]
    assert (logged["incident"], logged["reason"]) == (str(incident.id), incident.resolution)
    found = aftermath.of(incident)
    assert found is not None
    assert incident.evidence.ending is not None
    assert incident.resolved_at is not None
    mitigated_at = incident.evidence.ending.mitigated_at
    assert mitigated_at is not None
    recovery = (START + timedelta(minutes=60)).timestamp()
    assert 0.0 < mitigated_at.timestamp() - recovery < 60.0  # a request a second: it is found within sixty
    with database.session() as session:
        of_stream = (Record.stream_id == stream.id) & (Record.ended_at >= incident.change_point_at)
        of_stream &= Record.ended_at <= mitigated_at
        emitted = int(session.scalars(select(func.sum(Record.emitted)).where(of_stream)).one() or 0)
    assert found.tokens == emitted
    assert found.basis in ("measured", "formula")
    lost = incident.evidence.slowdown
    assert lost is not None
    assert found.tokens_lost is not None
    assert found.tokens_lost.value == pytest.approx(emitted * lost / (1 - lost))
    text = summary(incident, stream)
    assert text.endswith(found.text)
    assert "best now" not in text.lower()
    told = document(incident, stream, "resolved", "http://sidecar")["incident"]
    assert told["aftermath"] == msgspec.to_builtins(found)
    monkeypatch.setenv("COLUMNS", "400")
    with running_sidecar(database, tmp_path) as client:
        shown = client.get(f"/api/v1/incidents/{incident.id}").json()
        assert shown["aftermath"]["text"] == found.text
        assert shown["actions"] == []
        listed = client.get("/api/v1/incidents").json()["incidents"][0]
        assert listed["aftermath"] == shown["aftermath"]
        page = client.get(f"/incidents/{incident.id}").text
        for name in ("Lasted", "Time to detect", "Time to mitigate", "Tokens lost"):
            assert f"<dt>{name}</dt>" in page
        assert f"about {found.tokens_lost.value:,.0f}" in page
        told = client.get(f"/api/v1/streams/{stream.id}").json()["last_incident"]
        assert (told["id"], told["aftermath"]["text"]) == (str(incident.id), found.text)
        assert found.text in client.get(f"/streams/{stream.id}").text
        status = CliRunner().invoke(app, ["status", "--sidecar", str(client.base_url)])
        ended = f"{incident.resolved_at:%Y-%m-%dT%H:%M:%S}Z"
        assert f"last incident, resolved {ended}: {found.text}" in status.output


def test_times_and_tokens_of_an_incident_that_a_new_draft_mended(database: Database) -> None:
    """Open for half an hour, detected five minutes after the change, mitigated twelve."""
    incident_id = add_incident(database, [], opened_at=NOW)
    incident = resolved(
        database, incident_id, NOW + timedelta(minutes=25), mitigated_at=NOW + timedelta(minutes=7)
    )
    speed = Speed(40.0, 0.025, 3.0, 0.075, 400)
    cost = Cost(speed, speed, Interval(0.2, 0.15, 0.25))
    incident.evidence = replace(
        incident.evidence,
        slowdown_measured=0.2,
        cost=cost,
        ending=replace(incident.evidence.ending or Ending(0, None), tokens=40_000),
    )
    found = aftermath.of(incident)
    assert found is not None
    assert (found.lasted_seconds, found.detected_after_seconds, found.mitigated_after_seconds) == (
        1800.0,
        300.0,
        720.0,
    )
    assert found.tokens_lost is not None
    numbers = (found.tokens_lost.value, found.tokens_lost.low, found.tokens_lost.high)
    assert numbers == pytest.approx((10_000, 7_058.8, 13_333.3), rel=1e-4)
    assert found.text == (
        "It lasted 30 min; detected after 5.0 min; mitigated after 12 min; it cost about 10,000 tokens "
        "(7,059 to 13,333), measured."
    )


def test_what_a_person_resolved_is_not_said_to_be_mitigated(database: Database) -> None:
    incident_id = add_incident(database, [], opened_at=NOW)
    incident = resolved(database, incident_id, NOW + timedelta(minutes=25))
    found = aftermath.of(incident)
    assert found is not None
    assert found.mitigated_after_seconds is None
    assert "nothing shows that it was mitigated" in found.text


def test_half_of_a_fall_that_was_won_back_is_told_with_the_end(database: Database) -> None:
    incident = resolved(database, add_incident(database, [], opened_at=NOW), NOW + timedelta(minutes=25))
    promoted_at, half_at = NOW + timedelta(minutes=8), NOW + timedelta(minutes=10)
    told = Mitigation("v2", promoted_at=promoted_at, half_at=half_at)
    incident.evidence = replace(incident.evidence, mitigation=told)
    found = aftermath.of(incident)
    assert found is not None
    half = "half of the fall was won back 10 min after it was confirmed, 2.0 min after the promotion"
    assert f"; {half}; " in found.text


def test_speculation_that_loses_at_some_loads_does_not_tell_how_many_tokens_it_cost(
    database: Database,
) -> None:
    incident = resolved(database, add_incident(database, [], opened_at=NOW), NOW + timedelta(minutes=25))
    incident.evidence = replace(incident.evidence, goodput=goodput("speculation_loses", 0.2))
    found = aftermath.of(incident)
    assert found is not None
    assert (found.tokens_lost, found.basis) == (None, None)


def test_a_loss_that_may_be_of_all_tokens_is_told_without_an_interval(database: Database) -> None:
    """Its upper end would be any number of tokens."""
    incident = resolved(database, add_incident(database, [], opened_at=NOW), NOW + timedelta(minutes=25))
    speed = Speed(40.0, 0.025, 3.0, 0.075, 400)
    incident.evidence = replace(
        incident.evidence,
        slowdown_measured=0.2,
        cost=Cost(speed, speed, Interval(0.2, 0.15, 1.0)),
        ending=Ending(40_000, None),
    )
    found = aftermath.of(incident)
    assert found is not None
    assert found.text.endswith("it cost about 10,000 tokens, measured.")


def test_an_unknown_slowdown_costs_an_unknown_number_of_tokens_and_a_rise_none(database: Database) -> None:
    incident = resolved(database, add_incident(database, [], opened_at=NOW), NOW + timedelta(minutes=1))
    incident.evidence = replace(incident.evidence, slowdown_measured=None, slowdown_formula=None)
    found = aftermath.of(incident)
    assert found is not None
    assert found.tokens_lost is None
    assert found.text.endswith("what it cost in tokens is not known.")
    incident.direction, incident.evidence = "up", replace(incident.evidence, slowdown_measured=0.2)
    risen = aftermath.of(incident)
    assert risen is not None
    assert (risen.tokens_lost, risen.basis) == (None, None)
    assert "cost" not in risen.text


@pytest.mark.parametrize(
    ("evidence", "told"),
    [
        ({"slowdown_measured": None, "slowdown_formula": 0.2}, "about 10,000 tokens, by formula."),
        ({"slowdown_measured": 0.2, "slowdown_formula": 0.5}, "about 10,000 tokens, measured."),
        ({"slowdown_measured": None, "goodput": goodput("slower", 0.2)}, "about 10,000 tokens, measured."),
    ],
)
def test_what_it_cost_says_whether_that_was_measured(
    database: Database, evidence: dict[str, Any], told: str
) -> None:
    incident = resolved(database, add_incident(database, [], opened_at=NOW), NOW + timedelta(minutes=1))
    incident.evidence = replace(incident.evidence, ending=Ending(40_000, None), **evidence)
    found = aftermath.of(incident)
    assert found is not None
    assert found.text.endswith(told)


def test_an_incident_that_an_earlier_version_resolved_still_has_its_times(database: Database) -> None:
    incident = resolved(database, add_incident(database, [], opened_at=NOW), NOW + timedelta(minutes=10))
    incident.evidence = replace(incident.evidence, ending=None)
    found = aftermath.of(incident)
    assert found is not None
    assert (found.lasted_seconds, found.detected_after_seconds) == (900.0, 300.0)
    assert (found.tokens, found.tokens_lost, found.mitigated_after_seconds) == (None, None, None)


def test_an_open_incident_has_no_aftermath(database: Database) -> None:
    incident_id = add_incident(database, [])
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        assert aftermath.of(incident) is None


@pytest.mark.parametrize("ahead", [timedelta(hours=3), -timedelta(hours=3)])
def test_with_a_lying_clock_no_time_is_negative_and_no_token_is_left_out(
    database: Database, ahead: timedelta
) -> None:
    """Of a source whose clock is three hours ahead the change lies after its detection."""
    rng = np.random.default_rng(2)
    now = datetime.now(UTC)
    start = (now + ahead).timestamp() - 300
    drawn = Server().serve(rng, 300, 4, segment="german", start=start)
    store(database, records(rng, drawn))
    with database.session() as session:
        (stream,) = session.query(Stream).all()
        stream_id = stream.id
    incident_id = add_incident(database, [], stream_id=stream_id, opened_at=now)
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        incident.change_point_at = datetime.fromtimestamp(start + 99.5, UTC)
    found = aftermath.of(resolved(database, incident_id, now + timedelta(minutes=1)))
    assert found is not None
    assert found.tokens == sum(item.emitted for item in drawn[100:])
    assert found.lasted_seconds >= 60.0
    assert (found.detected_after_seconds is None) is (ahead > timedelta())
    if ahead > timedelta():
        assert "when it was detected is not known, as the source's clock is ahead" in found.text


def test_the_tokens_are_those_of_the_changed_segments_between_change_and_end(database: Database) -> None:
    """Over hours: whole minutes come from the rollups, both ends from the records; probes do not count."""
    rng, start = np.random.default_rng(3), datetime.now(UTC) - timedelta(hours=4)
    german = [
        item
        for minute in range(0, 240, 7)
        for item in Server().serve(
            rng, 3, 4, segment="german", start=(start + timedelta(minutes=minute, seconds=13)).timestamp()
        )
    ]
    code = Server().serve(rng, 50, 4, segment="code", start=start.timestamp() + 3600)
    probes = [
        msgspec.structs.replace(item, kind="probe")
        for item in records(rng, Server().serve(rng, 9, 4, segment="german", start=start.timestamp() + 7200))
    ]
    store(database, [*records(rng, [*german, *code]), *probes])
    with database.session() as session:
        (stream,) = session.query(Stream).all()
        stream_id = stream.id
    other = add_stream(database, "v9")
    assert other != stream_id
    incident_id = add_incident(database, [], stream_id=stream_id, opened_at=start + timedelta(hours=1))
    changed_at = start + timedelta(minutes=30, seconds=20)
    with database.session() as session:
        incidents.find(session, incident_id)[0].change_point_at = changed_at
    found = aftermath.of(resolved(database, incident_id, datetime.now(UTC)))
    assert found is not None
    assert found.tokens == sum(item.emitted for item in german if item.ended_at >= changed_at.timestamp())


def test_the_notification_of_the_end_says_it_too(database: Database) -> None:
    incident_id = add_incident(database, ["webhook:here"])
    resolve(database, incident_id)
    with database.session() as session:
        incident, stream = incidents.find(session, incident_id)
        text = document(incident, stream, "resolved", "")["summary"]
    assert "It lasted 5.0 min; detected after 5.0 min; " in text


def test_the_pipeline_alone_closes_without_traffic_and_claims_no_mitigation(database: Database) -> None:
    """A segment that sends nothing any more has not recovered."""
    rng = np.random.default_rng(5)
    pipeline = Pipeline(database, DetectorConfig(minimum_drop=0.1, history=1024), Metrics())
    both = {"rare": GOOD, "code": GOOD}
    send_segments(database, rng, both, 0, 700)
    send_segments(database, rng, {**both, "rare": BAD}, 30, 120)
    fold_and_examine(pipeline, database)
    assert only_incident(database)[0].state == "open"
    for minute in (40, 60, 80):
        send_segments(database, rng, {"code": GOOD}, minute, 600)
    fold_and_examine(pipeline, database)
    incident, _ = only_incident(database)
    assert incident.state == "resolved", "it did not end"
    assert incident.resolution is not None
    assert "send no traffic any more" in incident.resolution
    assert incident.evidence.ending is not None
    assert incident.evidence.ending.mitigated_at is None


def test_what_is_back_while_another_segment_goes_silent_was_mitigated_and_costs_until_then(
    database: Database,
) -> None:
    rng = np.random.default_rng(6)
    pipeline = Pipeline(database, DetectorConfig(minimum_drop=0.1, history=1024), Metrics())
    send_segments(database, rng, {"rare": GOOD, "code": GOOD}, 0, 700)
    send_segments(database, rng, {"rare": BAD, "code": GOOD}, 30, 120)
    send_segments(database, rng, {"rare": BAD, "code": BAD}, 34, 240)
    for minute in (40, 60, 80):
        send_segments(database, rng, {"code": GOOD}, minute, 600)
    fold_and_examine(pipeline, database)
    incident, _ = only_incident(database)
    assert incident.state == "resolved", "it did not end"
    assert incident.resolution is not None
    assert "(rare) send no traffic any more" in incident.resolution
    (back,) = {each.back_at for each in incident.segments if each.segment == "code"}
    assert back is not None
    assert incident.evidence.ending is not None
    assert incident.evidence.ending.mitigated_at == back
    with database.session() as session:
        emitted = func.coalesce(func.sum(Record.emitted), 0)
        changed = changed_since(incident.segments, incident.change_point_at)
        of_each = (and_(Record.segment == name, Record.ended_at >= at) for name, at in changed.items())
        since = select(emitted).where(or_(*of_each))
        until_back = session.scalars(since.where(Record.ended_at <= back)).one()
        assert session.scalars(since).one() > 2 * until_back
    assert incident.evidence.ending.tokens == until_back


def test_a_segment_that_may_go_on_under_another_name_is_not_over_with_the_others(
    database: Database,
) -> None:
    incident_id = add_incident(database, [])
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        german = replace(incident.segments[0], segment="german", evidence=2e6, silent_at=900)
        incident.segments = (german, replace(german, segment="code", silent_at=None))
        incident.evidence = replace(incident.evidence, false_alarm_every=1e5)
        change = SegmentChange("code", german.before, german.before, 2e6)
        closed = DriftClosed("down", 1_000, NOW.timestamp(), 800, 700, "recovered", (change,))
        opening.close(session, incident, closed, NOW)
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        assert incident.state == "open"
        assert {each.segment: each.back_at for each in incident.segments} == {"german": None, "code": NOW}


def test_a_segment_that_fell_silent_and_was_found_fallen_again_is_over_where_the_detector_says_so(
    database: Database,
) -> None:
    incident_id = add_incident(database, [])
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        german = replace(incident.segments[0], evidence=2e6, silent_at=900)
        incident.segments = (german,)
        incident.evidence = replace(incident.evidence, false_alarm_every=1e5)
        change = SegmentChange(german.segment, german.before, german.before, 2e6)
        closed = DriftClosed("down", 2_000, NOW.timestamp(), 1_800, 1_700, "recovered", (change,))
        opening.close(session, incident, closed, NOW)
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        assert incident.state == "resolved"
        assert incident.evidence.ending is not None
        assert incident.evidence.ending.mitigated_at == NOW


def test_segments_that_fell_silent_one_by_one_were_not_mitigated(database: Database) -> None:
    incident_id = add_incident(database, [])
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        german = replace(incident.segments[0], segment="german", evidence=2e6, silent_at=900)
        incident.segments = (german, replace(german, segment="code", silent_at=950))
        incident.evidence = replace(incident.evidence, false_alarm_every=1e5)
        for name in ("german", "code"):
            opening.come_back(session, incident, [name], opening.SILENT.format(name), NOW, NOW, is_back=False)
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        assert incident.state == "resolved"
        assert incident.evidence.ending is not None
        assert incident.evidence.ending.mitigated_at is None


def send_segments(
    database: Database, rng: np.random.Generator, servers: dict[str, Server], minute: int, count: int
) -> None:
    """So many requests of each segment, a second apart, from that minute of two hours ago on."""
    start = (datetime.now(UTC) - timedelta(hours=2) + timedelta(minutes=minute)).timestamp()
    drawn = [
        item
        for name, server in servers.items()
        for item in server.serve(rng, count, 4, segment=name, start=start)
    ]
    store(database, records(rng, sorted(drawn, key=lambda item: item.ended_at)))


def test_of_an_incident_that_outlasted_the_rollups_of_minutes_the_tokens_are_all_told(
    database: Database,
) -> None:
    """Those are kept for 35 days, and the rollups of hours for 400. It began within an hour of UTC, of which
    nothing is left."""
    rng = np.random.default_rng(4)
    start = (datetime.now(UTC) - timedelta(days=60)).replace(minute=20, second=0, microsecond=0)
    drawn = [
        item
        for at in (start, start + timedelta(hours=3), start + timedelta(days=30), start + timedelta(days=59))
        for item in Server().serve(rng, 30, 4, segment="german", start=at.timestamp())
    ]
    store(database, records(rng, drawn))
    with database.session() as session:
        (stream,) = session.query(Stream).all()
        incident_id = add_incident(database, [], stream_id=stream.id, opened_at=start + timedelta(minutes=5))
        past = datetime.now(UTC) - timedelta(days=35)
        session.execute(delete(Rollup).where(Rollup.minute < past))
        session.execute(delete(Record).where(Record.ended_at < past))
    found = aftermath.of(resolved(database, incident_id, datetime.now(UTC)))
    assert found is not None
    assert found.tokens == sum(item.emitted for item in drawn[30:])
