"""Incidents of goodput, on a real database: what pages, what does not, what is said, and how they end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sqlalchemy import select, update

from driftguard.detection import DetectorConfig
from driftguard.incidents import cost_measurement, goodput
from driftguard.incidents.message import summary
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.pipeline.look_around import LookAround
from driftguard.status.gather import gather
from driftguard.store import goodput_watches, incidents, notifications
from driftguard.store.database import Database
from driftguard.store.tables import GoodputWatchRow, Incident, IncidentTransition, Stream, StreamCost
from tests.alerting.http_receiver import wait_until
from tests.cost.goodput_traffic import Machine
from tests.incidents.test_cost_measurement import records
from tests.pipeline.examining import PAGER, examine, fold_and_examine
from tests.pipeline.sidecar import running_sidecar
from tests.pipeline.traffic import store

DAYS = 90.0
SLOWER_IS_OPEN = 'driftguard_incidents_open{direction="slower",severity="critical"} 1.0'
STEADY = {"mood": 0.03, "stalls": 0.05}


class Served:
    """A server whose requests are stored as they end; its clock ends `hours` from its beginning about now."""

    def __init__(self, database: Database, seed: int, hours: float = 12.0, **machine: Any) -> None:
        start = datetime.now(UTC) - timedelta(hours=hours)
        self.database = database
        self.rng = np.random.default_rng(seed)
        self.machine = Machine(clock=start.timestamp(), **{**STEADY, **machine})

    def serve(self, hours: float, **told: Any) -> None:
        """Then looks, as a sidecar does."""
        count = int(hours * 3600.0 / self.machine.seconds_apart)
        store(self.database, records(self.rng, self.machine.serve(self.rng, count, **told)))
        look(self.database)


def look(database: Database) -> None:
    now = datetime.now(UTC)
    with database.session() as session:
        session.execute(update(StreamCost).values(measured_at=StreamCost.measured_at - timedelta(hours=1)))
    cost_measurement.refresh(database, PAGER, now)
    with database.session() as session:
        ids = list(session.scalars(select(Stream.id).where(Stream.method != "none")))
    for stream_id in ids:
        goodput.look(database, stream_id, PAGER, now, DAYS)
    examine(database)


def found(database: Database) -> list[tuple[Incident, Stream]]:
    with database.session() as session:
        return incidents.list_page(session, limit=100)


def reasons(database: Database, incident: Incident) -> list[str]:
    with database.session() as session:
        query = select(IncidentTransition.reason).where(IncidentTransition.incident_id == incident.id)
        return list(session.scalars(query.order_by(IncidentTransition.id)))


def pages(database: Database, incident: Incident) -> list[str]:
    with database.session() as session:
        return [page.severity for page in notifications.of_incident(session, incident.id)]


def losing(database: Database, seed: int) -> Served:
    """Speculation loses under load, which is told by an incident."""
    quiet: dict[str, Any] = {"without": 0.2, "load": 4.0, "acceptance": 0.85, "per_draft": 0.0129}
    served = Served(database, seed, 20.0, **quiet, noise=0.1, stalls=0.01)
    served.serve(4.0)
    served.machine.load, served.machine.per_draft = 14.0, 0.0212
    while not found(database):
        served.serve(0.5)
    ((incident, _),) = found(database)
    assert incident.evidence.goodput is not None
    assert incident.evidence.goodput.kind == "speculation_loses"
    return served


def serve_switched_off(served: Served, count: int) -> None:
    """Without draft tokens, a second apart; the server goes on naming the draft that it does not use."""
    served.machine.without, served.machine.seconds_apart = 1.0, 1.0
    drawn = records(served.rng, served.machine.serve(served.rng, count))
    named = {"draft": "draft", "draft_version": "v1", "method": "draft_model"}
    store(served.database, [msgspec.structs.replace(one, **named) for one in drawn])
    look(served.database)


def test_a_machine_that_gets_slower_pages_although_acceptance_stays(
    database: Database, tmp_path: Path
) -> None:
    served = Served(database, 1)
    served.serve(6.0)
    assert found(database) == []
    served.machine.slower = 1.5
    changed_at = datetime.fromtimestamp(served.machine.clock, UTC)
    served.serve(2.0)
    ((incident, stream),) = found(database)
    assert (incident.direction, incident.severity, incident.state) == ("slower", "critical", "open")
    assert abs(incident.change_point_at - changed_at) < timedelta(minutes=11)
    told = incident.evidence.goodput
    assert told is not None
    assert (told.kind, told.acceptance, told.by_acceptance) == ("slower", "none", False)
    assert told.lost == pytest.approx(1 / 3, abs=0.08)
    assert told.concurrency == (9, 16)
    assert incident.evidence.cost is not None
    assert incident.evidence.cost.lost is not None
    text = summary(incident, stream)
    assert "slower at the same load (at 9 to 16 requests at once) since" in text
    assert f"Acceptance did not move: {incident.acceptance_before:.2f} before" in text
    assert incident.diagnosis is not None
    assert (incident.diagnosis.cause, incident.diagnosis.retrain) == ("machine", False)
    assert "retraining would not help" in text
    with database.session() as session:
        (page,) = notifications.of_incident(session, incident.id)
        assert (page.event, page.severity) == ("firing", "critical")
        (status,) = gather(session, datetime.now(UTC))
    assert status.verdict == "degraded"
    assert status.acceptance_verdict != "degraded"
    assert "tokens come" in status.text
    with running_sidecar(database, tmp_path) as client:
        answer = client.get(f"/api/v1/incidents/{incident.id}").json()
        assert (answer["direction"], answer["evidence"]["goodput"]["kind"]) == ("slower", "slower")
        (best,) = [action for action in answer["actions"] if action["best"]]
        assert best["kind"] == "restart"
        assert "slower at the same load" in client.get(f"/incidents/{incident.id}").text
        wait_until(lambda: SLOWER_IS_OPEN in client.get("/metrics").text, "the incident in the metrics")
        # What pages a change of acceptance:
        assert "driftguard_incident_acceptance_after_ratio{" not in client.get("/metrics").text


def test_it_ends_where_tokens_come_as_before(database: Database) -> None:
    served = Served(database, 2)
    served.serve(6.0)
    served.machine.slower = 1.5
    served.serve(2.0)
    served.machine.slower = 1.0
    served.serve(2.0)
    ((incident, stream),) = found(database)
    assert incident.state == "resolved"
    assert incident.resolution == "tokens come as fast again as before at the same load"
    assert "It lasted 6." in summary(incident, stream)
    assert "; mitigated after 4" in summary(incident, stream)
    assert "; it cost about" in summary(incident, stream)
    served.serve(1.0)
    assert len(found(database)) == 1


def test_a_sidecar_that_restarts_goes_on_with_what_it_knew(database: Database) -> None:
    """Everything is in the database: each look begins there, and a second sidecar opens nothing twice."""
    served = Served(database, 3)
    for _ in range(12):
        served.serve(0.5)
    served.machine.slower = 1.6
    for _ in range(8):
        served.serve(0.25)
        look(database)
    assert len(found(database)) == 1


def test_more_load_is_no_fall_of_goodput(database: Database) -> None:
    """Tokens per second of a request halve, as four times as many run; within a band of loads too."""
    served = Served(database, 4)
    for load in (4.0, 9.0, 15.0, 16.0):
        served.machine.load = load
        served.serve(2.5)
    assert found(database) == []


def test_without_the_load_or_with_times_that_were_filled_in_nobody_is_paged(database: Database) -> None:
    for told in ({"concurrency": None}, {"time_per_output_token_seconds": 0.02}):
        served = Served(database, 5)
        served.serve(5.0, **told)
        served.machine.slower = 3.0
        if "time_per_output_token_seconds" in told:
            told = {"time_per_output_token_seconds": 0.06}
        served.serve(2.0, **told)
        assert found(database) == []


def test_many_requests_whose_times_say_nothing_are_not_read_again_and_again(database: Database) -> None:
    served = Served(database, 6, seconds_apart=2.0)
    served.serve(3.0, concurrency=None)
    with database.session() as session:
        (stream_id,) = session.scalars(select(Stream.id))
        assert goodput_watches.known(session, stream_id).seq > 0


def test_speculation_that_loses_under_load_pages_at_steady_acceptance(database: Database) -> None:
    """vllm#26504: +23% on a quiet server, -16% on a busy one, acceptance as high."""
    served = Served(database, 7, without=0.1, load=4.0, acceptance=0.85, per_draft=0.0129, stalls=0.01)
    served.serve(4.0)
    assert found(database) == []
    served.machine.load, served.machine.per_draft = 14.0, 0.0212  # every draft token is computed there
    served.serve(5.0)
    ((incident, stream),) = found(database)
    assert (incident.direction, incident.state) == ("slower", "open")
    told = incident.evidence.goodput
    assert told is not None
    assert told.kind == "speculation_loses"
    assert told.acceptance == "none"
    assert told.concurrency == (9, 16)
    assert incident.severity in ("warning", "critical")
    text = summary(incident, stream)
    assert "loses at 9 to 16 requests at once since" in text
    assert "Acceptance did not move: 0.85 before, 0.85 now." in text
    assert "best now: switch speculation off: " in text
    assert incident.diagnosis is not None
    assert (incident.diagnosis.cause, incident.diagnosis.retrain) == ("load", False)
    with database.session() as session:
        (status,) = [item for item in gather(session, datetime.now(UTC)) if item.stream.method != "none"]
    assert status.verdict == "speculation_loses"
    assert status.incident_id == incident.id
    served.machine.load, served.machine.per_draft = 4.0, 0.0129
    for _ in range(6):
        served.serve(0.5)
    ((incident, _),) = found(database)
    assert incident.state == "resolved"
    assert incident.resolution is not None
    assert incident.resolution.startswith("speculation does not lose any more.")


def test_a_further_fall_is_told_once_and_ends_with_the_first(database: Database) -> None:
    served = Served(database, 20, stalls=0.01)
    served.serve(6.0)
    served.machine.slower = 1.2
    served.serve(3.0)
    ((incident, _),) = found(database)
    assert incident.severity == "warning"
    assert not any("further" in told for told in reasons(database, incident))
    served.machine.slower = 2.0
    fell_at = datetime.fromtimestamp(served.machine.clock, UTC)
    for _ in range(6):
        served.serve(0.25)
    ((incident, stream),) = found(database)
    (told,) = [told for told in reasons(database, incident) if told.startswith("goodput fell further")]
    assert told.startswith("goodput fell further: tokens come about 5")
    assert "slower than before the incident at 9 to 16 requests at once" in told
    goodput_change = incident.evidence.goodput
    assert goodput_change is not None
    assert goodput_change.further is not None
    assert abs(goodput_change.further.at - fell_at) < timedelta(minutes=11)
    assert incident.evidence.slowdown == pytest.approx(0.5, abs=0.05)
    assert incident.tokens_per_second_after is not None
    assert incident.tokens_per_second_before is not None
    assert incident.tokens_per_second_after / incident.tokens_per_second_before == pytest.approx(
        0.5, abs=0.05
    )
    assert f", and still slower since {goodput_change.further.at:%Y-%m-%d %H:%M:%S} UTC" in summary(
        incident, stream
    )
    assert incident.severity == "critical"
    assert pages(database, incident) == ["critical"]  # the first one had reached nobody yet
    served.machine.slower = 1.0
    served.serve(2.0)
    ((incident, stream),) = found(database)
    assert incident.resolution == "tokens come as fast again as before at the same load"
    assert "It lasted " in summary(incident, stream)


def test_tokens_that_come_slower_while_speculation_loses_are_told_in_its_incident(database: Database) -> None:
    served = losing(database, 21)
    served.serve(2.0)  # what is usual at this load is learned
    served.machine.slower = 1.6
    served.serve(2.0)
    ((incident, stream),) = found(database)
    (told,) = [told for told in reasons(database, incident) if "further" in told and "instead" not in told]
    assert told.startswith("goodput fell further: tokens come about 3")
    assert incident.severity == "critical"
    assert "tokens also come 3" in summary(incident, stream)
    served.machine.slower = 1.0
    served.serve(2.0)
    ((incident, stream),) = found(database)
    assert incident.state == "open"
    assert reasons(database, incident)[-1] == "tokens come as fast again as before at the same load"
    assert "tokens also come" not in summary(incident, stream)
    served.machine.load, served.machine.per_draft = 4.0, 0.0129
    for _ in range(6):
        served.serve(0.5)
    ((incident, _),) = found(database)
    assert str(incident.resolution).startswith("speculation does not lose any more.")


def test_it_ends_where_speculation_is_switched_off(database: Database) -> None:
    """As it says itself."""
    served = losing(database, 23)
    for _ in range(4):
        serve_switched_off(served, 1_500)
    ((incident, stream),) = found(database)
    assert incident.resolution == "speculation is off: the newest requests had no draft tokens"
    assert "; mitigated after " in summary(incident, stream)


def test_slower_tokens_are_over_where_nothing_is_drafted_any_more_and_the_status_says_that_it_stopped(
    database: Database,
) -> None:
    served = Served(database, 24, hours=20.0)
    pipeline = Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics())
    served.serve(6.0)
    served.machine.slower = 1.5
    served.serve(2.0)
    serve_switched_off(served, 2_100)
    fold_and_examine(pipeline, database)
    ((incident, _),) = found(database)
    assert (incident.direction, incident.state) == ("slower", "open")
    with database.session() as session:
        (status,) = gather(session, datetime.now(UTC))
    assert (status.verdict, status.incident_id) == ("drafting_stopped", None)
    assert status.text.startswith("Drafting has stopped: ")
    for _ in range(2):
        serve_switched_off(served, 100)
    ((incident, stream),) = found(database)
    assert incident.resolution == "speculation is off: the newest requests had no draft tokens"
    assert "; mitigated after " not in summary(incident, stream)  # the machine may be as slow as it was


def test_slower_tokens_go_on_where_speculation_was_off_for_a_moment(database: Database) -> None:
    served = Served(database, 25, hours=20.0)
    served.serve(6.0)
    served.machine.slower = 1.5
    served.serve(2.0)
    for _ in range(2):
        serve_switched_off(served, 2_100)
        served.machine.without, served.machine.seconds_apart = 0.0, 10.0
        served.serve(1.0)
    ((incident, _),) = found(database)
    assert incident.state == "open"
    served.machine.slower = 1.0
    served.serve(2.0)
    ((incident, _),) = found(database)
    assert incident.resolution == "tokens come as fast again as before at the same load"


def test_speculation_that_loses_more_is_told_in_its_incident(database: Database) -> None:
    served = losing(database, 22)
    ((incident, _),) = found(database)
    first = incident.evidence.goodput
    assert first is not None
    assert first.factor is not None
    assert incident.severity == "warning"
    served.machine.load, served.machine.per_draft = 28.0, 0.036
    for _ in range(4):
        served.serve(0.5)
    ((incident, stream),) = found(database)
    (told,) = [told for told in reasons(database, incident) if "further" in told and "instead" not in told]
    assert told.startswith("goodput fell further: speculation is 0.")
    assert f"times as fast as none at 17 to 32 requests at once, {first.factor.value:.2f} before" in told
    assert incident.severity == "critical"
    assert "loses at 17 to 32 requests at once since" in summary(incident, stream)


def test_a_fall_of_acceptance_is_one_incident(database: Database) -> None:
    served = Served(database, 8)
    pipeline = Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics())
    served.serve(6.0)
    served.machine.acceptance = 0.2
    rows = served.machine.serve(served.rng, 200)
    store(database, records(served.rng, rows))
    fold_and_examine(pipeline, database)
    served.serve(2.0)
    ((incident, _),) = found(database)
    assert incident.direction == "down"
    with database.session() as session:
        incidents.move(session, incident.id, "resolved", "we know", datetime.now(UTC))
    served.serve(0.5)
    assert len(found(database)) == 1


def test_a_fall_of_goodput_that_acceptance_explains_is_handed_over(database: Database) -> None:
    """The detector found the fall of acceptance later than the watch its cost."""
    served = Served(database, 9)
    served.serve(6.0)
    served.machine.acceptance = 0.2
    served.serve(2.0)
    ((incident, stream),) = found(database)
    assert incident.direction == "slower"
    assert "Acceptance fell: " in summary(incident, stream)
    assert incident.diagnosis is not None
    assert not incident.diagnosis.retrain
    fold_and_examine(Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics()), database)
    look(database)
    served.serve(1.0)
    states = {one.direction: (one.state, one.resolution) for one, _ in found(database)}
    assert states["down"][0] == "open"
    assert states["slower"][0] == "resolved"
    assert "acceptance fell, which explains it" in str(states["slower"][1])
    assert len(found(database)) == 2


def test_who_resolves_it_takes_the_speed_there_is_for_normal(database: Database) -> None:
    served = Served(database, 10, hours=20.0)
    served.serve(6.0)
    served.machine.slower = 1.5
    served.serve(2.0)
    ((incident, _),) = found(database)
    with database.session() as session:
        incidents.move(session, incident.id, "resolved", "another machine type", datetime.now(UTC))
    served.serve(0.1)  # only now the watch learns of it
    served.serve(6.0)
    assert len(found(database)) == 1
    served.machine.slower = 2.4
    served.serve(2.0)
    assert [one.state for one, _ in found(database)] == ["open", "resolved"]


def test_a_damaged_detector_state_leaves_it_open(database: Database) -> None:
    """Looking around and relearning end what they know; this is not theirs."""
    served = Served(database, 11)
    served.serve(6.0)
    served.machine.slower = 1.5
    served.serve(2.0)
    LookAround(database, Metrics()).look(datetime.now(UTC))
    ((incident, _),) = found(database)
    assert incident.state == "open"
    assert reasons(database, incident)[0].startswith("tokens come about")


@pytest.mark.slow
def test_twenty_quiet_streams_with_heavy_tails_page_nobody(database: Database) -> None:
    """Half a day each, of moods, stalls, a daily load and rare segments."""
    rng = np.random.default_rng(12)
    start = datetime.now(UTC) - timedelta(hours=12)
    ugly: dict[str, Any] = {"mood": 0.1, "stalls": 0.1, "noise": 0.3, "daily": 1.5, "seconds_apart": 12.0}
    machines = [Machine(clock=start.timestamp(), load=4.0 + number, **ugly) for number in range(20)]
    for _ in range(3):
        for number, machine in enumerate(machines):
            drawn = records(rng, machine.serve(rng, 1_200))
            store(database, [msgspec.structs.replace(one, server=f"server-{number}") for one in drawn])
        look(database)
    assert found(database) == []


def test_the_chore_looks_at_what_has_new_traffic_and_has_new_incidents_examined(database: Database) -> None:
    served = Served(database, 13)
    rows = served.machine.serve(served.rng, 2_200)
    served.machine.slower = 2.0
    store(database, records(served.rng, [*rows, *served.machine.serve(served.rng, 700)]))
    opened: list[bool] = []
    now = datetime.now(UTC)
    for later in (0, 6):  # minutes; nothing came between the looks
        at = now + timedelta(minutes=later)
        goodput.refresh(database, PAGER, at, false_alarm_days=DAYS, on_opened=lambda: opened.append(True))
    assert opened == [True]
    ((incident, _),) = found(database)
    assert incident.awaits_examination
    with database.session() as session:
        assert goodput_watches.due(session, timedelta(), now + timedelta(days=1), limit=10) == []


def test_what_a_clock_that_was_ahead_has_looked_at_is_looked_at_again(database: Database) -> None:
    served = Served(database, 14)
    store(database, records(served.rng, served.machine.serve(served.rng, 50)))
    now = datetime.now(UTC)
    for at in (now + timedelta(days=30), now):
        goodput.refresh(database, PAGER, at, false_alarm_days=DAYS)
    with database.session() as session:
        assert session.scalars(select(GoodputWatchRow.looked_at)).all() == [now]
