"""Two targets, or two draft versions, served side by side: neither replaced the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest

from driftguard.incidents import target_replaced
from driftguard.records import AcceptanceRecord
from driftguard.store import incidents
from driftguard.store.database import Database
from tests.incidents.test_target_replaced import GOOD, WORSE, all_incidents, fold_all, of_target, of_version
from tests.pipeline.traffic import Traffic, store

Served = Callable[[list[AcceptanceRecord]], list[AcceptanceRecord]]


def second_target(records: list[AcceptanceRecord]) -> list[AcceptanceRecord]:
    return of_target(records, "target-2")


def second_draft(records: list[AcceptanceRecord]) -> list[AcceptanceRecord]:
    return of_version(records, "v-canary")


def serve_both(
    database: Database, traffic: Traffic, second: Served, pairs: int, first: Mapping[str, float] = GOOD
) -> None:
    """Two requests of each in turn; folded and examined after each minute or so."""
    for start in range(0, pairs, 30):
        served: list[AcceptanceRecord] = []
        for _ in range(min(30, pairs - start)):
            served += [*traffic.draw(2, first), *second(traffic.draw(2, WORSE))]
        store(database, served)
        fold_all(database)


@pytest.mark.parametrize("second", [second_target, second_draft])
@pytest.mark.parametrize("seconds_apart", [1.0, 0.2])
def test_what_is_served_beside_the_first_is_no_replacement_and_pages_nobody(
    database: Database, second: Served, seconds_apart: float
) -> None:
    """Nor where the traffic is so dense that its baseline is ready within the time that a rollout takes."""
    traffic = Traffic(seed=1, seconds_apart=seconds_apart)
    store(database, traffic.draw(600, GOOD))
    serve_both(database, traffic, second, 450)
    assert all_incidents(database) == []


def test_a_fall_of_the_first_stays_open_while_a_second_target_is_served_beside_it(database: Database) -> None:
    traffic = Traffic(seed=5)
    store(database, traffic.draw(900, GOOD))
    store(database, traffic.draw(400, WORSE))
    fold_all(database)
    serve_both(database, traffic, second_target, 300, WORSE)
    (fall,) = all_incidents(database)
    assert (fall.state, fall.resolution) == ("open", None)
    with database.session() as session:
        assert incidents.find(session, fall.id)[1].target == "target"


@pytest.mark.parametrize("second", [second_target, second_draft])
def test_a_rollout_that_serves_both_for_a_while_is_a_replacement(database: Database, second: Served) -> None:
    """Though it was looked at while both were served."""
    traffic = Traffic(seed=2, seconds_apart=0.2)
    store(database, traffic.draw(600, GOOD))
    serve_both(database, traffic, second, 300)  # four minutes
    assert all_incidents(database) == []
    store(database, second(traffic.draw(1_600, WORSE)))
    fold_all(database)
    (incident,) = all_incidents(database)
    assert (incident.direction, incident.state) == ("down", "open")
    assert incident.evidence.predecessor_stream_id is not None


def test_the_target_that_was_replaced_is_found_beside_one_that_goes_on(database: Database) -> None:
    traffic = Traffic(seed=3)
    beside = of_target(traffic.draw(200, WORSE), "small")
    store(database, beside)
    store(database, traffic.draw(600, GOOD))
    served: list[AcceptanceRecord] = []
    for _ in range(450):
        served += second_target(traffic.draw(2, WORSE))
        served += of_target(traffic.draw(1, {"other": 0.5}), "small")
    store(database, served)
    fold_all(database)
    told = [each.diagnosis.summary for each in all_incidents(database) if each.diagnosis]
    assert told == ["the target was replaced (target before)"]


@pytest.mark.parametrize(("earlier", "second"), [("target", second_target), ("draft", second_draft)])
def test_what_fell_silent_long_before_is_not_replaced_by_one_beside_its_successor(
    database: Database, earlier: str, second: Served
) -> None:
    traffic = Traffic(seed=6)
    older = traffic.draw(600, GOOD)
    store(database, of_target(older, "target-0") if earlier == "target" else of_version(older, "v0"))
    store(database, traffic.draw(900, GOOD))
    fold_all(database)
    serve_both(database, traffic, second, 300)
    assert all_incidents(database) == []


def test_a_clock_that_was_set_back_as_the_target_was_replaced_is_not_taken_for_two_side_by_side(
    database: Database,
) -> None:
    traffic = Traffic(seed=4)
    store(database, traffic.draw(600, GOOD))
    traffic.clock -= 2 * target_replaced.IN_SERVICE_WITHIN
    store(database, second_target(traffic.draw(900, WORSE)))
    fold_all(database)
    assert [each.state for each in all_incidents(database)] == ["open"]


# Fewer requests, or more, than a baseline takes.
@pytest.mark.parametrize(("tried", "second"), [(3, second_target), (320, second_draft)])
def test_what_was_tried_beside_the_first_is_compared_once_it_serves_alone(
    database: Database, tried: int, second: Served
) -> None:
    """And not while the first is no longer silent than it was before."""
    traffic = Traffic(seed=11)
    store(database, traffic.draw(600, GOOD))
    store(database, second(traffic.draw(tried, WORSE)))
    store(database, traffic.draw(200, GOOD))
    traffic.clock += timedelta(minutes=10)
    store(database, traffic.draw(200, GOOD))
    taken_at = traffic.clock
    for requests, states in ((500, []), (1_700, ["open"])):
        store(database, second(traffic.draw(requests, WORSE)))
        fold_all(database)
        assert [each.state for each in all_incidents(database)] == states
    (incident,) = all_incidents(database)
    assert incident.direction == "down"
    assert incident.evidence.predecessor_stream_id is not None
    assert abs((incident.change_point_at - taken_at).total_seconds()) < 5
