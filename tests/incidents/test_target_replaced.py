"""Another target behind the same draft: told as such, compared with the one before, and retrained for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec
import numpy as np
import pytest
from sqlalchemy import select, update

from driftguard.api.actions import ActionModel, Place
from driftguard.cost.best_action import best_of
from driftguard.detection import DetectorConfig
from driftguard.incidents import cost_measurement, remedy
from driftguard.incidents.opening import NOBODY
from driftguard.incidents.target_replaced import fallen_segments
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records import AcceptanceRecord
from driftguard.records.documents.incident import names_of
from driftguard.retraining.due import why_not
from driftguard.store import incidents
from driftguard.store.acceptance_levels import AcceptanceLevel
from driftguard.store.database import Database
from driftguard.store.tables import Draft, Incident, Notification, StreamCost
from tests.pipeline.examining import fold_and_examine
from tests.pipeline.traffic import Traffic, store

GOOD = {"code": 0.75, "german": 0.7}
WORSE = {"code": 0.75, "german": 0.45}


def fold_all(database: Database) -> None:
    config = DetectorConfig(minimum_drop=0.1)
    fold_and_examine(Pipeline(database, config, Metrics()), database)


def of_target(records: list[AcceptanceRecord], target: str) -> list[AcceptanceRecord]:
    return [msgspec.structs.replace(record, target=target) for record in records]


def all_incidents(database: Database) -> list[Incident]:
    with database.session() as session:
        return list(session.scalars(select(Incident)))


def test_a_draft_that_fits_the_new_target_less_is_retrained_against_it(database: Database) -> None:
    traffic = Traffic(seed=1)
    store(database, traffic.draw(600, GOOD))
    replaced_at = traffic.clock
    store(database, of_target(traffic.draw(900, WORSE), "target-2"))
    fold_all(database)
    (incident,) = all_incidents(database)
    assert (incident.direction, incident.state) == ("down", "open")
    assert abs((incident.change_point_at - replaced_at).total_seconds()) < 5
    assert names_of(incident.segments) == ("german",)
    assert incident.acceptance_before == pytest.approx(0.7, abs=0.03)
    assert incident.acceptance_after == pytest.approx(0.45, abs=0.03)
    assert incident.diagnosis is not None
    assert (incident.diagnosis.cause, incident.diagnosis.confidence) == ("target_replaced", "high")
    assert incident.diagnosis.summary == "the target was replaced (target before)"
    assert why_not(incident.diagnosis, "high") is None
    with database.session() as session:
        assert incidents.find(session, incident.id)[1].target == "target-2"
        assert [row.event for row in session.scalars(select(Notification))] == ["firing"]


def test_it_ends_where_the_new_target_accepts_what_the_old_one_did(database: Database) -> None:
    traffic = Traffic(seed=4)
    store(database, traffic.draw(600, GOOD))
    store(database, of_target(traffic.draw(900, WORSE), "target-2"))
    fold_all(database)
    for draw, state in ((WORSE, "open"), (GOOD, "resolved")):
        store(database, of_target(traffic.draw(2_500, draw), "target-2"))
        fold_all(database)
        with database.session() as session:  # long ago
            session.execute(update(StreamCost).values(measured_at=traffic.clock - timedelta(hours=1)))
        cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
        (fall,) = (each for each in all_incidents(database) if each.direction == "down")
        assert fall.state == state
    assert str(fall.resolution).startswith("acceptance is back at what it was before the change: german 0.")


def test_a_draft_that_fits_the_new_target_as_well_is_left_alone(database: Database) -> None:
    traffic = Traffic(seed=2)
    store(database, traffic.draw(600, GOOD))
    store(database, of_target(traffic.draw(900, GOOD), "target-2"))
    fold_all(database)
    assert all_incidents(database) == []


def test_another_draft_on_another_target_is_no_replacement(database: Database) -> None:
    traffic = Traffic(seed=3)
    store(database, traffic.draw(600, GOOD))
    store(database, of_target(traffic.draw(900, WORSE, draft_version="v2"), "target-2"))
    fold_all(database)
    assert all_incidents(database) == []


def test_small_or_unshown_falls_are_none() -> None:
    old = [AcceptanceLevel("a", 500, 0.7, 0.01), AcceptanceLevel("b", 20, 0.7, 0.01)]
    small = [AcceptanceLevel("a", 500, 0.66, 0.01)]
    noisy = [AcceptanceLevel("a", 30, 0.55, 0.25)]
    few = [AcceptanceLevel("b", 500, 0.2, 0.01)]
    fell = [AcceptanceLevel("a", 500, 0.55, 0.01)]
    assert [bool(fallen_segments(old, new, 0.1)) for new in (small, noisy, few, fell)] == [
        False, False, False, True,
    ]  # fmt: skip


def test_its_cost_is_told_once_it_is_measured(database: Database) -> None:
    """Such an incident opens without one; nothing before the change is to be compared with."""
    traffic = Traffic(seed=1)
    store(database, traffic.draw(600, GOOD))
    store(database, of_target(traffic.draw(900, WORSE), "target-2"))
    fold_all(database)
    (opened,) = all_incidents(database)
    assert opened.evidence.cost is None
    cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
    (incident,) = all_incidents(database)
    cost = incident.evidence.cost
    assert cost is not None
    assert cost.lost is None
    assert incident.tokens_per_second_after == cost.now.tokens_per_second


def of_version(records: list[AcceptanceRecord], version: str) -> list[AcceptanceRecord]:
    return [msgspec.structs.replace(record, draft_version=version) for record in records]


@pytest.mark.parametrize("is_promoted_here", [False, True])
def test_a_draft_version_that_nobody_announced_and_accepts_less_is_an_incident(
    database: Database, is_promoted_here: bool
) -> None:
    """A draft that was promoted here is compared by the watch over its promotion instead."""
    traffic = Traffic(seed=7)
    older = traffic.draw(600, GOOD)
    one_before = older[0]
    store(database, older)
    fold_all(database)
    replaced_at = traffic.clock
    newer = of_version(traffic.draw(900, WORSE), "v-unannounced")
    if is_promoted_here:
        now = datetime.now(UTC)
        one = newer[0]
        draft = Draft(
            server=one.server,
            target=one.target,
            version=one.draft_version,
            name=one.draft,
            method=one.method,
            directory="/drafts/v",
            state="in_service",
            created_at=now,
            promoted_at=now,
        )
        with database.session() as session:
            session.add(draft)
    store(database, newer)
    fold_all(database)
    found = all_incidents(database)
    if is_promoted_here:
        assert found == []
        return
    (incident,) = found
    assert (incident.direction, incident.state) == ("down", "open")
    assert names_of(incident.segments) == ("german",)
    assert abs((incident.change_point_at - replaced_at).total_seconds()) < 5
    assert incident.diagnosis is not None
    known = incident.diagnosis
    assert (known.cause, known.confidence, known.retrain) == ("draft_wrong", "medium", False)
    assert known.summary.endswith(f"({one_before.draft_version} before)")
    best = best_of(remedy.of_incident(incident))
    assert (best.kind, best.text) == ("roll_back", f"roll back to draft {one_before.draft_version}")
    (told,) = [
        action
        for action in ActionModel.all_of(
            remedy.of_incident(incident), Place("chat", "v-unannounced", engine=True)
        )
        if action.best
    ]
    assert told.command == f"start chat with draft {one_before.draft_version} again"
    assert told.request is None  # the sidecar does not have it
    cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
    (incident,) = all_incidents(database)
    assert best_of(remedy.of_incident(incident)).kind == "roll_back"
    with database.session() as session:
        (opening,) = incidents.transitions(session, incident.id)
    assert "was replaced by v-unannounced: acceptance fell from 0.7" in opening.reason


def test_a_draft_version_that_accepts_as_much_is_no_incident(database: Database) -> None:
    traffic = Traffic(seed=8)
    store(database, traffic.draw(600, GOOD))
    store(database, of_version(traffic.draw(900, GOOD), "v-unannounced"))
    fold_all(database)
    assert all_incidents(database) == []


def with_k(
    records: list[AcceptanceRecord],
    k: int,
    first: float | Mapping[str, float],
    seed: int,
    later: float | None = None,
) -> list[AcceptanceRecord]:
    """Of a chain of k draft tokens: the first is accepted so often (in each segment), and each next one as
    often again, or `later`."""
    rng = np.random.default_rng(seed)
    changed = []
    for record in records:
        accepts = first if isinstance(first, float) else first[record.segment]
        often = [accepts] + [accepts if later is None else later] * (k - 1)
        kept = np.cumprod(rng.random((record.steps, k)) < often, axis=1)
        accepted = kept.sum(axis=0).tolist()
        drafted = [record.steps] * k
        changed.append(
            msgspec.structs.replace(
                record,
                num_speculative_tokens=k,
                drafted=sum(drafted),
                accepted=sum(accepted),
                emitted=sum(accepted) + record.steps,
                drafted_per_position=drafted,
                accepted_per_position=accepted,
            )
        )
    return changed


@pytest.mark.parametrize("falls", [False, True])
def test_a_fall_together_with_another_k_is_found_by_the_first_draft_token(
    database: Database, falls: bool
) -> None:
    traffic = Traffic(seed=9)
    store(database, with_k(traffic.draw(900, GOOD), 4, 0.75, 1))
    changed_at = traffic.clock
    store(database, with_k(traffic.draw(900, GOOD), 5, 0.6 if falls else 0.75, 2))
    fold_all(database)
    found = all_incidents(database)
    if not falls:
        assert found == []
        return
    (incident,) = found
    assert (incident.direction, incident.state) == ("down", "open")
    assert set(names_of(incident.segments)) == set(GOOD)
    assert abs((incident.change_point_at - changed_at).total_seconds()) < 5
    assert incident.acceptance_before == pytest.approx(0.75, abs=0.02)
    assert incident.acceptance_after == pytest.approx(0.6, abs=0.02)
    with database.session() as session:
        (opening,) = incidents.transitions(session, incident.id)
    assert "the first of them is accepted less as well" in opening.reason
