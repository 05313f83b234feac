"""A segment under another name that accepts less at the same moment is an incident; a mere rename is none."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec
import numpy as np
import pytest
from sqlalchemy import select, update

from driftguard.detection import DetectorConfig
from driftguard.incidents import cost_measurement
from driftguard.incidents.message import summary
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records import AcceptanceRecord
from driftguard.records.documents.incident import names_of
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import Incident, StreamCost
from tests.pipeline.examining import PAGER, fold_and_examine
from tests.pipeline.traffic import Traffic, store

SHARES = {"chat": 0.4, "code": 0.35, "german": 0.25}
USUAL = {"chat": 0.75, "code": 0.6, "german": 0.5}
BEFORE, AFTER = 2_500, 2_500


def mixed(
    traffic: Traffic, seed: int, count: int, rates: Mapping[str, float], shares: Mapping[str, float]
) -> list[AcceptanceRecord]:
    """Requests of segments with these shares."""
    chosen = np.random.default_rng(seed).choice(list(shares), count, p=list(shares.values()))
    return [traffic.draw(1, {name: rates[name]})[0] for name in chosen.tolist()]


def renamed(records: list[AcceptanceRecord], names: Mapping[str, str]) -> list[AcceptanceRecord]:
    return [
        msgspec.structs.replace(record, segment=names.get(record.segment, record.segment))
        for record in records
    ]


def fold_all(database: Database) -> list[Incident]:
    config = DetectorConfig(minimum_drop=0.1)
    fold_and_examine(Pipeline(database, config, Metrics()), database)
    with database.session() as session:
        return list(session.scalars(select(Incident).where(Incident.direction == "down")))


def run(
    database: Database, seed: int, rates: Mapping[str, float], names: Mapping[str, str]
) -> list[Incident]:
    traffic = Traffic(seed=seed, seconds_apart=0.5)
    store(database, mixed(traffic, seed, BEFORE, USUAL, SHARES))
    store(database, renamed(mixed(traffic, seed + 1, AFTER, rates, SHARES), names))
    return fold_all(database)


def reasons(database: Database, incident: Incident) -> str:
    with database.session() as session:
        return "\n".join(each.reason for each in incidents.transitions(session, incident.id))


@pytest.mark.parametrize("seed", [11])
def test_a_fall_together_with_another_name_is_found(database: Database, seed: int) -> None:
    (incident,) = run(database, seed, {**USUAL, "chat": 0.6}, {"chat": "chat-v2"})
    assert (incident.direction, incident.state) == ("down", "open")
    assert names_of(incident.segments) == ("chat-v2",)
    assert incident.acceptance_before == pytest.approx(0.75, abs=0.02)
    assert incident.acceptance_after == pytest.approx(0.6, abs=0.02)
    told = "segment chat-v2 took the place of chat, with as much of the traffic and as long requests"
    assert told in reasons(database, incident)
    assert BEFORE < incident.change_point_seq <= BEFORE + 30


def test_a_fall_of_all_segments_under_other_names_is_found(database: Database) -> None:
    names = {name: f"{name}-v2" for name in SHARES}
    (incident,) = run(database, 14, {name: rate - 0.15 for name, rate in USUAL.items()}, names)
    assert incident.acceptance_before - incident.acceptance_after == pytest.approx(0.15, abs=0.03)
    assert set(names_of(incident.segments)) <= set(names.values())


def test_a_renamed_segment_joins_the_incident_of_those_that_kept_their_name(database: Database) -> None:
    rates = {name: rate - 0.15 for name, rate in USUAL.items()}
    (incident,) = run(database, 15, rates, {"chat": "chat-v2"})
    assert set(names_of(incident.segments)) == {"chat-v2", "code", "german"}
    assert "segment chat-v2 took the place of chat" in reasons(database, incident)


@pytest.mark.parametrize("names", [{"chat": "chat-v2"}, {name: f"{name}-v2" for name in SHARES}])
@pytest.mark.parametrize("seed", [16])
def test_another_name_alone_is_no_incident(database: Database, seed: int, names: dict[str, str]) -> None:
    assert run(database, seed, USUAL, names) == []


def test_a_new_segment_that_accepts_less_is_no_incident(database: Database) -> None:
    traffic = Traffic(seed=18, seconds_apart=0.5)
    store(database, mixed(traffic, 18, BEFORE, USUAL, SHARES))
    shares = {"chat": 0.3, "code": 0.25, "german": 0.15, "tools": 0.3}
    store(database, mixed(traffic, 19, AFTER, {**USUAL, "tools": 0.3}, shares))
    assert fold_all(database) == []


def test_a_segment_that_ended_and_another_one_that_began_are_two(database: Database) -> None:
    """The new one has four times as long answers."""
    traffic = Traffic(seed=20, seconds_apart=0.5)
    store(database, mixed(traffic, 20, BEFORE, USUAL, SHARES))
    rates = {**USUAL, "chat": 0.5}
    longer = [
        record
        if record.segment != "chat"
        else msgspec.structs.replace(record, segment="story", output_tokens=4 * (record.output_tokens or 1))
        for record in mixed(traffic, 21, AFTER, rates, SHARES)
    ]
    store(database, longer)
    assert fold_all(database) == []


class Running:
    """A stream whose segment chat got another name and fell from .75 to .6 at once; more may come."""

    def __init__(self, database: Database, seed: int, rates: Mapping[str, float]) -> None:
        self.database, self.seed = database, seed
        start = datetime.now(UTC) - timedelta(hours=3)
        self.traffic = Traffic(seed=seed, start=start, seconds_apart=0.5)
        self.pipeline = Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics())
        store(database, mixed(self.traffic, seed, BEFORE, USUAL, SHARES))
        self.send(AFTER, rates)

    def send(self, count: int, rates: Mapping[str, float]) -> None:
        """Then looks, as a sidecar does every few minutes."""
        self.seed += 1
        drawn = mixed(self.traffic, self.seed, count, rates, SHARES)
        store(self.database, renamed(drawn, {"chat": "chat-v2"}))
        fold_and_examine(self.pipeline, self.database)
        with self.database.session() as session:
            session.execute(
                update(StreamCost).values(measured_at=StreamCost.measured_at - timedelta(hours=1))
            )
        cost_measurement.refresh(self.database, PAGER, datetime.now(UTC))

    def incident(self) -> Incident:
        with self.database.session() as session:
            return session.scalars(select(Incident).where(Incident.direction == "down")).one()


FALLEN = {**USUAL, "chat": 0.6}
ALL_FALLEN = {name: rate - 0.15 for name, rate in USUAL.items()}


def test_it_ends_where_the_new_name_accepts_what_the_old_one_did(database: Database) -> None:
    running = Running(database, 30, FALLEN)
    running.send(600, FALLEN)
    assert running.incident().state == "open"
    running.send(1_200, {**USUAL, "chat": 0.64})  # less than halfway back
    assert running.incident().state == "open"
    running.send(1_200, USUAL)
    incident = running.incident()
    assert incident.state == "resolved"
    told = "acceptance is back at what it was under the older name: chat-v2 0.7"
    assert str(incident.resolution).startswith(told)
    with database.session() as session:
        text = summary(*incidents.find(session, incident.id))
    assert "It lasted " in text
    assert "; mitigated after " in text


def test_other_segments_that_come_back_leave_it_open(database: Database) -> None:
    running = Running(database, 40, ALL_FALLEN)
    assert set(names_of(running.incident().segments)) == {"chat-v2", "code", "german"}
    running.send(2_500, FALLEN)
    incident = running.incident()
    assert incident.state == "open"
    last = reasons(database, incident).splitlines()[-1]
    assert last.startswith("acceptance is back at its baseline: ")
    assert last.endswith("; chat-v2 is not back yet")
    running.send(1_200, USUAL)
    assert running.incident().state == "resolved"


def test_it_comes_back_first_and_others_later(database: Database) -> None:
    running = Running(database, 50, ALL_FALLEN)
    running.send(1_200, {**ALL_FALLEN, "chat": USUAL["chat"]})
    incident = running.incident()
    assert incident.state == "open"
    assert "back at what it was under the older name: chat-v2" in reasons(database, incident)
    running.send(2_500, USUAL)
    assert running.incident().state == "resolved"


def test_a_fall_of_another_segment_while_it_is_open_is_told(database: Database) -> None:
    running = Running(database, 60, FALLEN)
    assert names_of(running.incident().segments) == ("chat-v2",)
    running.send(1_500, {**FALLEN, "code": 0.4})
    incident = running.incident()
    assert set(names_of(incident.segments)) == {"chat-v2", "code"}
    assert "\nacceptance fell from 0.5" in reasons(database, incident)


def test_a_second_fall_under_the_new_name_is_found_as_well(database: Database) -> None:
    """The detector had learned the fallen level as the baseline of the new name."""
    running = Running(database, 65, FALLEN)
    running.send(3_000, USUAL)
    assert running.incident().state == "resolved"
    running.send(600, USUAL)
    running.send(2_000, FALLEN)
    with database.session() as session:
        query = select(Incident).where(Incident.direction == "down").order_by(Incident.opened_seq)
        first, second = session.scalars(query)
    assert (first.state, second.state) == ("resolved", "open")
    assert names_of(second.segments) == ("chat-v2",)


@pytest.mark.parametrize("fell", [False, True])
def test_silent_hours_a_clock_set_back_and_restarts_make_no_fall_and_hide_none(
    database: Database, fell: bool
) -> None:
    """The clock is set back by an hour before the name changes, and once more after the incident opened."""
    traffic = Traffic(seed=70, start=datetime.now(UTC) - timedelta(hours=20), seconds_apart=0.5)
    shares = {"chat": 0.4, "code": 0.35, "german": 0.24, "rare": 0.01}
    usual = {**USUAL, "rare": 0.3}
    for number, hours in enumerate((5.0, -1.0, 3.0)):
        store(database, mixed(traffic, 70 + number, 900, usual, shares))
        fold_all(database)
        traffic.clock += timedelta(hours=hours)
    rates = {**usual, "chat": 0.6} if fell else usual
    for number, hours in enumerate((0.0, 2.0, -1.0, 4.0)):
        drawn = mixed(traffic, 80 + number, 900, rates, shares)
        store(database, renamed(drawn, {"chat": "chat-v2"}))
        fold_all(database)
        traffic.clock += timedelta(hours=hours)
    if not fell:
        assert fold_all(database) == []
        return
    (incident,) = fold_all(database)
    assert (incident.state, names_of(incident.segments)) == ("open", ("chat-v2",))
    assert reasons(database, incident).count("took the place of") == 1
