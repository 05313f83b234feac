"""An operator accepts a new level: relearned exactly once, over restarts and beside a fold that runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from driftguard.detection import BaselineReady, Finding, StreamState
from driftguard.detection.state.codec import from_parts
from driftguard.incident_lifecycle import IllegalTransition
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records.documents.incident import names_of, not_back
from driftguard.store import folding, incidents
from driftguard.store.database import Database
from driftguard.store.folding import StoredRecord
from driftguard.store.tables import DetectorState, Incident, Stream
from tests.alerting.http_receiver import wait_until
from tests.pipeline.test_fold_loop import BAD, CONFIG, GOOD, all_incidents, fold_all
from tests.pipeline.traffic import Traffic, store

NEW = "an operator accepted a new normal"


def new_pipeline(database: Database, learned: list[BaselineReady] | None = None) -> Pipeline:
    into = [] if learned is None else learned

    def keep(
        session: Session, stream: Stream, records: Sequence[StoredRecord], findings: Sequence[Finding]
    ) -> None:
        del session, stream, records
        into.extend(finding for finding in findings if isinstance(finding, BaselineReady))

    return Pipeline(database, CONFIG, Metrics(), after_fold=[keep], batch_records=100)


def accept(database: Database, incident_id: UUID) -> Incident:
    with database.session() as session:
        return incidents.accept_level(session, incident_id, "a new tenant", datetime.now(UTC))


def state_of(database: Database) -> StreamState:
    with database.session() as session:
        stream_id = session.scalars(select(DetectorState.stream_id)).one()
        return from_parts(folding.load(session, [stream_id])[stream_id])


@pytest.mark.parametrize("restarted", [False, True])
def test_the_new_level_is_learned_once_and_the_next_fall_is_measured_against_it(
    database: Database, restarted: bool
) -> None:
    learned: list[BaselineReady] = []
    traffic, pipeline = Traffic(seed=31), new_pipeline(database, learned)
    store(database, traffic.draw(1500, GOOD) + traffic.draw(300, BAD))
    fold_all(pipeline)
    (incident,) = all_incidents(database)
    del learned[:]

    resolved = accept(database, incident.id)
    assert (resolved.state, resolved.resolution) == (
        "resolved",
        "the operator accepted the new level as normal: a new tenant",
    )
    for _ in range(6):
        if restarted:
            pipeline = new_pipeline(database, learned)
        store(database, traffic.draw(150, BAD))
        fold_all(pipeline)
    assert [(ready.segment, ready.why.text) for ready in learned] == [("german", NEW)]
    assert learned[0].mean_per_request == pytest.approx(0.35, abs=0.03)
    assert len(all_incidents(database)) == 1  # what is normal now pages no more

    store(database, traffic.draw(450, {**BAD, "german": 0.1}))
    fold_all(pipeline)
    _, second = all_incidents(database)
    assert second.state == "open"
    assert second.segments[0].before.rate == pytest.approx(0.35, abs=0.03)


def test_a_second_sidecar_that_had_the_old_state_in_memory_goes_on_with_the_relearned_one(
    database: Database,
) -> None:
    traffic = Traffic(seed=32)
    one, other = new_pipeline(database), new_pipeline(database)
    store(database, traffic.draw(1500, GOOD) + traffic.draw(250, BAD))
    fold_all(one)
    store(database, traffic.draw(50, BAD))
    fold_all(other)
    (incident,) = all_incidents(database)
    accept(database, incident.id)
    for pipeline in (other, one, other, one, one):
        store(database, traffic.draw(150, BAD))
        fold_all(pipeline)
    state = state_of(database)
    german = state.names.index("german")
    assert state.accepted_anew[state.segment_of_stratum == german].all()
    assert state.ready.all()
    assert len(all_incidents(database)) == 1


@pytest.mark.parametrize("after_alarm", [BAD, GOOD])
def test_accepting_while_a_fold_holds_the_incident_waits_for_it(
    database: Database, database_url: str, after_alarm: dict[str, float]
) -> None:
    """The fold either leaves the incident open, then it is accepted; or ends it, then that is refused."""
    traffic = Traffic(seed=33)
    store(database, traffic.draw(1500, GOOD) + traffic.draw(300, BAD))
    fold_all(new_pipeline(database))
    (incident,) = all_incidents(database)
    folded, going_on = threading.Event(), threading.Event()

    def hold(
        session: Session, stream: Stream, records: Sequence[StoredRecord], findings: Sequence[Finding]
    ) -> None:
        del session, stream, records, findings
        folded.set()
        assert going_on.wait(60)

    slow = Pipeline(database, CONFIG, Metrics(), after_fold=[hold])
    store(database, traffic.draw(1200, after_alarm))
    with ThreadPoolExecutor(2) as threads:
        under_way = threads.submit(slow.fold_batch)
        assert folded.wait(60)
        accepting = threads.submit(accept, database, incident.id)
        wait_until(lambda: waiting_for_a_lock(database_url), "accept to wait for the fold")
        going_on.set()
        assert under_way.result(60) == 1200
        if after_alarm is GOOD:
            with pytest.raises(IllegalTransition, match="is already resolved"):
                accepting.result(60)
        else:
            accepting.result(60)
    (incident,) = all_incidents(database)
    assert incident.state == "resolved"
    assert incident.level_accepted is (after_alarm is BAD)
    with database.session() as session:
        ends = [step.to_state for step in incidents.transitions(session, incident.id)]
    assert ends == ["open", "resolved"]

    store(database, traffic.draw(30, after_alarm))
    fold_all(new_pipeline(database))
    assert state_of(database).accepted_anew.any() == (after_alarm is BAD)


def waiting_for_a_lock(database_url: str) -> bool:
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        query = (
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        (count,) = connection.execute(query).fetchone() or (0,)
    return bool(count)


LEVEL = dict.fromkeys(["code", "english", "french", "spanish", "polish", "german"], 0.7)
RISEN = dict.fromkeys(LEVEL, 0.74)  # by little in each: only all of them together show it, and are tested so
TURNED = {**RISEN, "german": 0.35}


@pytest.mark.parametrize("accepted", [("down",), ("up", "down")])
def test_what_is_accepted_of_one_incident_leaves_the_other_one_in_that_segment_alone(
    database: Database, accepted: tuple[str, ...]
) -> None:
    """German rose with the others, and then fell: its segment is in both incidents. Nothing that is accepted
    is left out, and the others' rise goes on."""
    traffic = Traffic(seed=44)
    pipeline = new_pipeline(database)
    store(database, traffic.draw(6000, LEVEL) + traffic.draw(600, RISEN) + traffic.draw(60, TURNED))
    fold_all(pipeline)
    by_direction = {incident.direction: incident for incident in all_incidents(database)}
    assert {incident.state for incident in by_direction.values()} == {"open"}
    named = {direction: set(names_of(each.segments)) for direction, each in by_direction.items()}
    assert named["down"] == {"german"}
    assert "german" in named["up"]
    for direction in accepted:
        accept(database, by_direction[direction].id)
    store(database, traffic.draw(6, TURNED))
    fold_all(pipeline)

    after = {incident.direction: incident for incident in all_incidents(database)}
    assert after["down"].state == "resolved"
    state = state_of(database)
    if "up" in accepted:
        assert after["up"].state == "resolved"
        assert state.incidents == (None, None)
    else:
        assert after["up"].state == "open"
        others = named["up"] - {"german"}
        assert set(names_of(not_back(after["up"].segments))) == others
        with database.session() as session:
            told = incidents.transitions(session, after["up"].id)[-1].reason
        assert told.startswith("the operator accepted a new level of german: what it accepts is learned anew")
        assert state.incidents[1] is not None
        assert set(state.incidents[1].names(state)) == others
    anew = {
        state.names[segment]
        for segment, is_anew in zip(state.segment_of_stratum, state.accepted_anew, strict=True)
        if is_anew
    }
    assert anew == ({"german"} if accepted == ("down",) else named["up"])

    if "up" not in accepted:
        store(database, traffic.draw(600, TURNED) + traffic.draw(6_000, {**LEVEL, "german": 0.35}))
        fold_all(pipeline)
        after = {incident.direction: incident for incident in all_incidents(database)}
        assert after["up"].state == "resolved"
        assert str(after["up"].resolution).startswith("acceptance is back ")
