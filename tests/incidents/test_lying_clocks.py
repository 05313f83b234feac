"""Another name or another K, and a server whose clock lies about then: no fall is hidden, and none made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from sqlalchemy import update

from driftguard.incidents import cost_measurement
from driftguard.records import AcceptanceRecord
from driftguard.records.documents.incident import names_of
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import Incident, StreamCost
from tests.incidents.test_renamed_segment import SHARES, USUAL, fold_all, mixed, reasons, renamed
from tests.incidents.test_target_replaced import with_k
from tests.pipeline.examining import PAGER
from tests.pipeline.traffic import Traffic, store

FALLEN = {**USUAL, "chat": 0.6}
BEFORE, AFTER = 2_500, 2_500
# Hours by which the clock moves after so many requests from the change on, one every two seconds.
LIES: Mapping[str, Mapping[int, float]] = {
    "set back by an hour with the change": {0: -1.0},
    "set back by 20 minutes with the change": {0: -1 / 3},
    "set back by 20 minutes soon after it": {60: -1 / 3},
    "set back by two hours soon after it": {150: -2.0},
    "a day ahead from the change on": {0: 24.0},
    "a day ahead for ten minutes": {100: 24.0, 400: -24.0},
    "an hour that comes twice": {900: -1.0},
    "an hour that is left out": {200: 1.0},
}


def at_change(
    traffic: Traffic, seed: int, rates: Mapping[str, float], lie: Mapping[int, float]
) -> Iterator[list[AcceptanceRecord]]:
    """What comes from the change on, before and after each move of the clock."""
    begin = 0
    for at, hours in [*sorted(lie.items()), (AFTER, 0.0)]:
        yield mixed(traffic, seed + begin, at - begin, rates, SHARES)
        traffic.clock += timedelta(hours=hours)
        begin = at


def renamed_under(
    database: Database, seed: int, rates: Mapping[str, float], lie: Mapping[int, float]
) -> list[Incident]:
    traffic = Traffic(seed=seed, start=datetime.now(UTC) - timedelta(hours=60), seconds_apart=2.0)
    store(database, mixed(traffic, seed, BEFORE, USUAL, SHARES))
    fold_all(database)
    for part in at_change(traffic, seed + 1, rates, lie):
        store(database, renamed(part, {"chat": "chat-v2"}))
        fold_all(database)
    return fold_all(database)


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_a_fall_with_another_name_is_found(database: Database, lie: str) -> None:
    (incident,) = renamed_under(database, 200, FALLEN, LIES[lie])
    assert (incident.state, names_of(incident.segments)) == ("open", ("chat-v2",))
    assert "segment chat-v2 took the place of chat" in reasons(database, incident)
    assert BEFORE < incident.change_point_seq <= BEFORE + 30


@pytest.mark.parametrize("lie", [name for name in LIES if "change" in name])
def test_another_name_alone_is_none(database: Database, lie: str) -> None:
    assert renamed_under(database, 300, USUAL, LIES[lie]) == []


@pytest.mark.parametrize("seed", [400])
def test_two_servers_ten_minutes_apart(database: Database, seed: int) -> None:
    """Both send as one; the name changes on both at once."""
    traffic = Traffic(seed=seed, start=datetime.now(UTC) - timedelta(hours=6), seconds_apart=2.0)
    other = timedelta(minutes=10)

    def of_both(count: int, rates: Mapping[str, float]) -> list[AcceptanceRecord]:
        return [
            msgspec.structs.replace(one, started_at=one.started_at - other, ended_at=one.ended_at - other)
            if number % 2
            else one
            for number, one in enumerate(mixed(traffic, seed + count, count, rates, SHARES))
        ]

    store(database, of_both(BEFORE, USUAL))
    fold_all(database)
    rates = FALLEN if seed == 400 else USUAL
    store(database, renamed(of_both(AFTER + 1, rates), {"chat": "chat-v2"}))
    assert [names_of(each.segments) for each in fold_all(database)] == ([("chat-v2",)] if seed == 400 else [])


def test_records_that_a_server_kept_back_are_not_taken_for_the_old_name_that_goes_on(
    database: Database,
) -> None:
    """Half of the requests before the change arrive in the middle of those after it."""
    traffic = Traffic(seed=500, start=datetime.now(UTC) - timedelta(hours=6), seconds_apart=2.0)
    before = mixed(traffic, 500, BEFORE, USUAL, SHARES)
    after = renamed(mixed(traffic, 501, AFTER, FALLEN, SHARES), {"chat": "chat-v2"})
    kept = before[1::2]
    store(database, before[::2])
    fold_all(database)
    for part in (after[:800], kept, after[800:]):
        store(database, part)
        fold_all(database)
    (incident,) = fold_all(database)
    assert names_of(incident.segments) == ("chat-v2",)


@pytest.mark.slow
@pytest.mark.parametrize("falls", [True, False])
@pytest.mark.parametrize("lie", LIES)
def test_a_fall_with_another_k(database: Database, lie: str, falls: bool) -> None:
    """Of the first draft token, from .75 to .6."""
    traffic = Traffic(seed=600, start=datetime.now(UTC) - timedelta(hours=60), seconds_apart=2.0)
    store(database, with_k(mixed(traffic, 600, BEFORE, USUAL, SHARES), 4, 0.75, 600))
    fold_all(database)
    for number, part in enumerate(at_change(traffic, 601, USUAL, LIES[lie])):
        store(database, with_k(part, 5, 0.6 if falls else 0.75, 601 + number))
        fold_all(database)
    if not falls:
        assert fold_all(database) == []
        return
    (incident,) = fold_all(database)
    assert set(names_of(incident.segments)) == set(SHARES)
    assert incident.acceptance_before == pytest.approx(0.75, abs=0.02)
    assert incident.acceptance_after == pytest.approx(0.6, abs=0.02)
    assert BEFORE < incident.change_point_seq <= BEFORE + 30


def test_a_clock_set_back_by_two_hours_while_an_incident_is_open_does_not_delay_its_end(
    database: Database,
) -> None:
    """Each is measured, and asked whether it is over, as soon as something has arrived since ten minutes."""
    traffic = Traffic(seed=700, start=datetime.now(UTC) - timedelta(hours=3), seconds_apart=2.0)
    store(database, mixed(traffic, 700, BEFORE, USUAL, SHARES), arrived_at=traffic.clock)
    fold_all(database)
    store(database, renamed(mixed(traffic, 701, AFTER, FALLEN, SHARES), {"chat": "chat-v2"}))
    (incident,) = fold_all(database)
    cost_measurement.refresh(database, PAGER, datetime.now(UTC))
    traffic.clock -= timedelta(hours=2)
    store(database, renamed(mixed(traffic, 702, AFTER, USUAL, SHARES), {"chat": "chat-v2"}))
    fold_all(database)
    with database.session() as session:
        session.execute(update(StreamCost).values(measured_at=datetime.now(UTC) - timedelta(minutes=11)))
    cost_measurement.refresh(database, PAGER, datetime.now(UTC))
    with database.session() as session:
        assert incidents.find(session, incident.id)[0].state == "resolved"
