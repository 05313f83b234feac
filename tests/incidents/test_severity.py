"""How grave an incident is: what it costs decides who is paged, and a fall that grows is told again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from sqlalchemy import select

from driftguard.cost import assess
from driftguard.detection import DetectorConfig
from driftguard.diagnosis import Cause, Confidence, Diagnosis
from driftguard.incidents import cost_measurement, diagnosing
from driftguard.incidents import opening as incident_severity
from driftguard.incidents.cost_measurement import Measurement
from driftguard.incidents.message import summary
from driftguard.incidents.opening import ChangePoint, Paging, severity_of
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records.documents.incident import IncidentDiagnosis, IncidentEvidence, SeenEvidence, names_of
from driftguard.retraining.ledger.incident_notes import begin_mitigation, end_mitigation
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Notification, Stream
from tests.alerting.http_receiver import http_receiver, wait_until
from tests.alerting.incident_rows import add_incident
from tests.cost.traffic import Server
from tests.incidents.test_cost_measurement import START, records
from tests.pipeline.examining import fold_and_examine
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import store

PAGER = Paging(("webhook:http://pager",))
SEED = 1


def server(rate: float) -> Server:
    """With K = 1 a step emits 1 + rate tokens. Long answers: a small fall is found soon."""
    return Server(accepts=(rate,), tokens=400, noise=0.02)


GOOD = server(0.7)
SLIGHT = server(0.69)  # by formula .6% slower; found so soon that it looks up to twice as much
WORSE = server(0.62)  # 5% slower
BAD = server(0.2)  # 29% slower


class World:
    """A database, its pipeline, and traffic of one stream."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.rng = np.random.default_rng(SEED)
        config = DetectorConfig(minimum_drop=0.1)
        self.pipeline = Pipeline(database, config, Metrics())
        self.minute = 0

    def send(self, *, fold: bool = True, **segments: tuple[Server, int]) -> None:
        """So many requests of each segment, one per second, from the next hour on."""
        start = (START + timedelta(minutes=self.minute)).timestamp()
        drawn = [
            item
            for segment, (behind, count) in segments.items()
            for item in behind.serve(self.rng, count, 1, start=start, segment=segment)
        ]
        self.minute += 60
        arrived_at = START + timedelta(minutes=self.minute)
        store(self.database, records(self.rng, sorted(drawn, key=lambda item: item.ended_at)), arrived_at)
        if fold:
            fold_and_examine(self.pipeline, self.database)

    def measure(self) -> None:
        now = START + timedelta(minutes=self.minute)
        cost_measurement.refresh(self.database, PAGER, now)

    def incident(self) -> tuple[Incident, Stream]:
        with self.database.session() as session:
            ((incident, stream),) = incidents.list_page(session, limit=10)
            return incident, stream

    def told(self) -> list[tuple[str, str]]:
        with self.database.session() as session:
            rows = session.scalars(select(Notification).order_by(Notification.id))
            return [(row.event, row.severity) for row in rows]

    def raised(self) -> list[str]:
        """What the history says of its severity: beside that, how the fall came."""
        return [step for step in self.history() if " instead of " in step]

    def history(self) -> list[str]:
        with self.database.session() as session:
            ((incident, _),) = incidents.list_page(session, limit=10)
            return [step.reason for step in incidents.transitions(session, incident.id)]


def test_a_fall_that_costs_next_to_nothing_pages_nobody_until_it_grows(database: Database) -> None:
    world = World(database)
    world.send(chat=(GOOD, 3_000))
    world.send(chat=(SLIGHT, 600))
    assert world.incident()[0].severity == "info"
    world.measure()
    assert (world.incident()[0].severity, world.told()) == ("info", [])

    world.send(chat=(WORSE, 2_000))
    world.measure()
    incident, stream = world.incident()
    assert incident.severity == "warning"
    lost = incident.evidence.slowdown_measured or 0.0
    assert lost == pytest.approx(1 - 1.62 / 1.7, abs=0.01)
    assert incident.tokens_per_second_after is not None
    assert incident.tokens_per_second_before is not None
    assert incident.tokens_per_second_after / incident.tokens_per_second_before == pytest.approx(1 - lost)
    because = "acceptance fell further: chat from 0.69 to 0.62"
    assert world.raised() == [f"warning instead of info: {because}"]
    assert f"Now warning: {because}." in summary(incident, stream)

    world.send(chat=(BAD, 2_000))
    world.measure()
    world.send(chat=(GOOD, 2_000), fold=False)  # it recovers, which is for the detector to say
    world.measure()
    assert world.incident()[0].severity == "critical"
    assert len(world.raised()) == 2
    # The first page had reached nobody yet: the graver one takes its place.
    assert world.told() == [("firing", "critical")]


def test_what_other_segments_lose_while_a_fall_is_open_is_told(database: Database) -> None:
    """The segment that falls joins the open incident, which thereby costs enough for a page."""
    world = World(database)
    world.send(chat=(GOOD, 1_200), code=(GOOD, 1_200))
    world.send(chat=(SLIGHT, 800), code=(GOOD, 800))
    assert names_of(world.incident()[0].segments) == ("chat",)
    world.measure()
    assert world.incident()[0].severity == "info"
    world.send(chat=(SLIGHT, 1_000), code=(WORSE, 1_000))
    world.measure()
    assert world.incident()[0].severity == "warning"
    assert names_of(world.incident()[0].segments) == ("chat", "code")
    assert "acceptance fell in more segments, since" in world.history()[-2]
    assert "code from 0.70 to 0.6" in world.history()[-2]
    assert "the changed segments have become about" in world.history()[-1]
    assert world.told() == [("firing", "warning")]


def test_a_further_fall_of_the_same_segment_is_told_once(database: Database) -> None:
    world = World(database)
    world.send(chat=(GOOD, 1_200))
    world.send(chat=(server(0.5), 600))
    for _ in range(2):
        world.measure()
    assert not any("further" in told for told in world.history())
    world.send(chat=(server(0.3), 400))
    for _ in range(2):
        world.measure()
    incident, stream = world.incident()
    further = "acceptance fell further: chat from 0.50 to 0.30"
    assert world.history()[1:] == [further, f"critical instead of warning: {further}"]
    assert incident.acceptance_after == pytest.approx(0.3, abs=0.02)
    assert "fell from 0.70 to 0.30 since" in summary(incident, stream)
    assert (incident.severity, world.told()) == ("critical", [("firing", "critical")])
    world.send(chat=(server(0.2), 400))
    world.measure()
    assert world.history()[-1] == "acceptance fell further: chat from 0.30 to 0.20"


def test_a_segment_that_joins_loses_what_it_loses_since_its_own_change(database: Database) -> None:
    """Also where it was back meanwhile. What it accepted before is no part of its fall, hence no later level
    a further one."""
    world = World(database)
    world.send(chat=(GOOD, 1_200), code=(GOOD, 1_200))
    world.send(chat=(server(0.5), 600), code=(GOOD, 600))
    world.measure()
    for _ in range(2):
        for count in (60, 400):
            world.send(chat=(server(0.5), count), code=(server(0.5), count))
            world.measure()
            levels = world.incident()[0].evidence.levels
            assert {name: level.rate for name, level in levels.items()} == {
                "chat": pytest.approx(0.5, abs=0.02),
                "code": pytest.approx(0.5, abs=0.02),
            }
        lost = world.incident()[0].evidence.slowdown_measured
        assert lost == pytest.approx(1 - 1.5 / 1.7, abs=0.01)
        world.send(chat=(server(0.5), 600), code=(GOOD, 600))
    assert [told for told in world.history() if "further" in told] == []
    assert sum("fell in more segments" in told for told in world.history()) == 2
    assert sum("chat is not back yet" in told for told in world.history()) == 2


def test_a_segment_that_is_back_hides_no_loss_of_another(database: Database) -> None:
    world = World(database)
    world.send(chat=(GOOD, 1_500), rare=(GOOD, 1_500))
    world.send(chat=(WORSE, 600), rare=(GOOD, 60))
    world.send(chat=(WORSE, 600), rare=(WORSE, 60))
    world.measure()
    assert names_of(world.incident()[0].segments) == ("chat", "rare")
    world.send(chat=(GOOD, 1_500), rare=(WORSE, 60))
    world.send(chat=(GOOD, 2_000), rare=(BAD, 200))
    world.measure()
    incident, stream = world.incident()
    assert "It is over in chat by now." in summary(incident, stream)
    assert incident.severity == "critical"
    assert incident.evidence.slowdown == pytest.approx(1 - 1.2 / 1.7, abs=0.01)


def test_what_a_segment_that_is_not_watched_yet_loses_is_told_as_well(database: Database) -> None:
    """Its reference period is not over, so that the detector cannot find its fall."""
    world = World(database)
    world.send(chat=(GOOD, 1_200), rare=(GOOD, 60))
    world.send(chat=(server(0.68), 1_200), rare=(BAD, 38))
    world.measure()
    assert names_of(world.incident()[0].segments) == ("chat",)
    assert "other segments have become at least" in world.history()[-1]


@pytest.mark.parametrize("later", ["other segment", "same segment"])
def test_what_falls_later_pages_although_the_open_fall_has_a_harmless_cause(
    database: Database, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """Another setting, say, which nobody has to look at: it may stay open for months, and what joins it has
    no incident of its own."""
    made = diagnosing.diagnosed

    def harmless(*arguments: Any) -> IncidentDiagnosis:
        return replace(made(*arguments), cause="configuration", confidence="high")

    monkeypatch.setattr(diagnosing, "diagnosed", harmless)
    world = World(database)
    world.send(chat=(GOOD, 1_200), code=(GOOD, 1_200))
    world.send(chat=(server(0.5), 600), code=(GOOD, 600))
    for _ in range(2):
        world.measure()
    assert (world.incident()[0].severity, world.told()) == ("info", [])

    if later == "other segment":
        world.send(chat=(server(0.5), 1_000), code=(BAD, 1_000))
    else:
        world.send(chat=(server(0.2), 1_000), code=(GOOD, 1_000))
    for _ in range(2):
        world.measure()
    incident, stream = world.incident()
    assert world.told() == [("firing", incident.severity)]
    assert incident.severity == "critical"
    assert "Now critical: " in summary(incident, stream)


def test_what_joins_a_fall_with_a_harmless_cause_pages_although_nothing_tells_what_it_costs(
    database: Database,
) -> None:
    """As where K varies: then each fall is a warning."""
    incident_id = add_incident(database, [], severity="info")
    with database.session() as session:
        incident = incidents.find(session, incident_id)[0]
        incident.evidence = IncidentEvidence()
        incident.diagnosis = diagnosed("down", "configuration", "high").diagnosis
        other = replace(incident.segments[0], segment="code")
        unknown = Measurement(None, [], [])
        cost_measurement.update_incident(session, incident, unknown, PAGER, datetime.now(UTC))
        assert incident.severity == "info"
        now = datetime.now(UTC)
        same, later = (ChangePoint(seq := incident.opened_seq + more, now, seq) for more in (0, 1))
        rare = replace(other, segment="rare")  # in which the same change is seen late
        incident_severity.join(session, incident, [rare], same, "rare fell as well", now)
        cost_measurement.update_incident(session, incident, unknown, PAGER, now)
        assert incident.severity == "info"
        incident_severity.join(session, incident, [other], later, "code fell as well", now)
        cost_measurement.update_incident(session, incident, unknown, PAGER, now)
        assert incident.severity == "warning"
        told = session.scalars(select(Notification.severity)).all()
    assert list(told) == ["warning"]


def test_with_a_threshold_of_0_every_fall_pages_over_real_http(database: Database, tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    start = START.timestamp()
    requests = [*GOOD.serve(rng, 1_200, 1, start=start), *SLIGHT.serve(rng, 1_800, 1, start=start + 1_200)]
    with (
        http_receiver() as receiver,
        running_sidecar(database, tmp_path, [receiver.url], page_slowdown=0.0) as client,
    ):
        post(client, records(rng, requests))
        wait_until(lambda: bool(receiver.taken()), "the page")
        (page,) = receiver.taken()
        assert page.body["incident"]["severity"] == "warning"
        answer = client.get(f"/api/v1/incidents/{page.body['incident']['id']}").json()
        assert [step["severity"] for step in answer["transitions"]] == ["warning"]
        assert [item["severity"] for item in answer["notifications"]] == ["warning"]


def test_a_mitigation_that_failed_returns_to_the_state_before_it_whatever_was_raised_meanwhile(
    database: Database, tmp_path: Path
) -> None:
    incident_id = add_incident(database, [], severity="warning")
    now = datetime.now(UTC)
    with database.session() as session:
        begin_mitigation(session, incident_id, "retraining", now)
        incident = incidents.find(session, incident_id)[0]
        assert incident_severity.raise_to(session, incident, "critical", "it grew", PAGER, now)
        assert not incident_severity.raise_to(session, incident, "warning", "it shrank", PAGER, now)
        end_mitigation(session, incident_id, "the gate refused the candidate", now)
        assert incidents.find(session, incident_id)[0].state == "open"
    with running_sidecar(database, tmp_path) as client:
        page = client.get(f"/incidents/{incident_id}").text
    assert "critical instead of warning: it grew" in page


def test_an_incident_that_is_over_becomes_no_graver(database: Database) -> None:
    incident_id: UUID = add_incident(database, [], severity="info")
    now = datetime.now(UTC)
    with database.session() as session:
        incident = incidents.move(session, incident_id, "resolved", "acceptance is back", now)
        assert not incident_severity.raise_to(session, incident, "critical", "it grew", PAGER, now)
        assert session.scalars(select(Notification)).all() == []


def diagnosed(direction: str, cause: Cause, confidence: Confidence) -> Incident:
    made = Diagnosis(cause, confidence, "", "", (), (), "", retrain=False, awaits_probes=False)
    known = IncidentDiagnosis.of(made, datetime(2026, 1, 1, tzinfo=UTC), SeenEvidence(0, 0))
    return Incident(direction=direction, diagnosis=known, evidence=IncidentEvidence())


@pytest.mark.parametrize(
    ("cause", "confidence", "severity"),
    [
        ("query_drift", "high", "critical"),
        ("machine", "high", "critical"),
        ("unknown", "low", "critical"),
        ("configuration", "medium", "critical"),
        ("configuration", "high", "info"),
        ("mix_shift", "high", "info"),
    ],
)
def test_only_a_sure_harmless_cause_keeps_a_page_back(
    cause: Cause, confidence: Confidence, severity: str
) -> None:
    assert severity_of(diagnosed("down", cause, confidence), 0.3) == severity


def test_suspicious_answers_page_although_nothing_got_slower() -> None:
    assert severity_of(diagnosed("up", "quality", "high"), -0.4) == "warning"
    assert severity_of(diagnosed("up", "unknown", "low"), -0.4) == "info"


def test_a_first_measurement_that_is_hardly_sure_is_told_and_pages_nobody(database: Database) -> None:
    """Of many small losses the first to be shown is one that chance made larger: this one is of .9%."""
    rng = np.random.default_rng(16)
    before, since = (
        Server(accepts=(rate,), noise=0.3).serve(rng, 600, 1, start=start, segment="german")
        for rate, start in ((0.7, 0.0), (0.685, 1_000.0))
    )
    measured = Measurement(assess(before, since, [], changed=["german"]), before, since)
    incident_id = add_incident(database, [], severity="info")
    with database.session() as session:
        incident = incidents.find(session, incident_id)[0]
        incident.evidence = IncidentEvidence(slowdown_formula=0.009)
        cost_measurement.update_incident(session, incident, measured, PAGER, datetime.now(UTC))
        assert (incident.evidence.slowdown_measured or 0.0) > 0.03
        assert incident.severity == "info"
        assert session.scalars(select(Notification)).all() == []
