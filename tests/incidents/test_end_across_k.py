"""A fall that came together with another K is judged by the first draft token, and so is its end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from driftguard.detection import DetectorConfig
from driftguard.incidents import cost_measurement
from driftguard.incidents.message import summary
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records.documents.incident import names_of
from driftguard.store import folding, incidents
from driftguard.store.database import Database
from driftguard.store.tables import Incident, StreamCost
from tests.incidents.test_target_replaced import GOOD, with_k
from tests.pipeline.examining import PAGER, fold_and_examine
from tests.pipeline.traffic import Traffic, store

USUAL, FALLEN = 0.75, 0.6  # of the first draft token


class Running:
    """A stream whose K went from 4 to 5 as its first draft token fell from .75 to .6; more may come."""

    def __init__(self, database: Database, seed: int) -> None:
        self.database, self.seed = database, seed
        self.traffic = Traffic(seed=seed, start=datetime.now(UTC) - timedelta(hours=3), seconds_apart=0.5)
        self.pipeline = Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics())
        self.now = datetime.now(UTC)
        self.send(900, 4, USUAL)
        self.send(900, 5, FALLEN)

    def send(self, count: int, k: int, first: float) -> None:
        """Then looks, as a sidecar does every ten minutes."""
        self.seed += 1
        store(self.database, with_k(self.traffic.draw(count, GOOD), k, first, self.seed))
        fold_and_examine(self.pipeline, self.database)
        with self.database.session() as session:
            session.execute(
                update(StreamCost).values(measured_at=StreamCost.measured_at - timedelta(hours=1))
            )
        self.now += timedelta(minutes=10)
        cost_measurement.refresh(self.database, PAGER, self.now)

    def incident(self) -> Incident:
        with self.database.session() as session:
            return session.scalars(select(Incident).where(Incident.direction == "down")).one()

    def reasons(self) -> list[str]:
        with self.database.session() as session:
            return [each.reason for each in incidents.transitions(session, self.incident().id)]


@pytest.mark.parametrize("k", [4, 5])
def test_it_ends_where_the_first_draft_token_is_accepted_as_before(database: Database, k: int) -> None:
    """At the new K, or as K is set back."""
    running = Running(database, 80)
    assert set(names_of(running.incident().segments)) == set(GOOD)
    running.send(600, 5, FALLEN)
    running.send(600, 5, 0.64)  # less than halfway back
    assert running.incident().state == "open"
    running.send(1_000, k, USUAL)
    incident = running.incident()
    assert incident.state == "resolved"
    told = "acceptance of the first draft token is back at what it was before K changed: code 0.7"
    assert str(incident.resolution).startswith(told)
    with database.session() as session:
        assert "; mitigated after " in summary(*incidents.find(session, incident.id))


def test_it_ends_although_other_requests_of_the_stream_depend_on_each_other(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another segment, or with settings that nobody uses any more."""
    running = Running(database, 7)
    summaries = folding.summaries

    def with_dependent_ones(session: Session, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        return {
            stream_id: {**one, "variance_inflation": 200.0}
            for stream_id, one in summaries(session, ids).items()
        }

    monkeypatch.setattr(folding, "summaries", with_dependent_ones)
    running.send(600, 5, USUAL)
    assert running.incident().state == "resolved"


def test_k_set_back_alone_does_not_end_it(database: Database) -> None:
    """All positions together accept more with fewer of them: that is no recovery."""
    running = Running(database, 90)
    for _ in range(3):
        running.send(600, 3, FALLEN)
    assert running.incident().state == "open"


def test_a_second_fall_at_the_new_k_is_found_as_well(database: Database) -> None:
    """The detector had learned the fallen level as the baseline at the new K."""
    running = Running(database, 100)
    running.send(600, 5, FALLEN)
    running.send(2_000, 5, USUAL)
    assert running.incident().state == "resolved"
    running.send(400, 5, USUAL)
    running.send(1_000, 5, FALLEN)
    with database.session() as session:
        query = select(Incident).where(Incident.direction == "down").order_by(Incident.opened_seq)
        first, second = session.scalars(query)
    assert (first.state, second.state) == ("resolved", "open")
