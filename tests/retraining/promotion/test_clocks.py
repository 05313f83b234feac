"""A rollout that is ordered, proved or settled by clocks that differ: of the machine of the nightly job, of
the sidecar, of the server. The clock of the database is the one that all of them share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from sqlalchemy import update

from driftguard.records.documents.retraining_run import Heard
from driftguard.retraining.engines.connect import connect
from driftguard.retraining.ledger.run_row import Job, begin, end
from driftguard.retraining.promotion.reconcile import settle
from driftguard.retraining.run import retrain
from driftguard.settings import Settings
from driftguard.store import retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import Stream
from tests.retraining import world
from tests.retraining.promotion.test_restart import Restarts
from tests.retraining.restarted import NEW, OLD, SERVER, passed_the_gate, promote, serves
from tests.retraining.world import record, store

TWO_HOURS = timedelta(hours=2)


@contextmanager
def clock_off_by(difference: timedelta) -> Iterator[None]:
    """As a process on a machine whose clock differs so much: of what decides about retrainings."""

    class Off(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + difference

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("driftguard.retraining.") and getattr(module, "datetime", None) is datetime:
                patch.setattr(module, "datetime", Off)
        yield


@pytest.fixture
def restarts(database: Database, tmp_path: Path) -> Restarts:
    return Restarts(database, tmp_path)


@pytest.fixture
def settings(restarts: Restarts) -> Settings:
    return restarts.settings()


@pytest.mark.parametrize("difference", [-TWO_HOURS, TWO_HOURS])
def test_a_promotion_by_a_job_whose_clock_is_wrong_has_its_time_and_is_proved_at_once(
    restarts: Restarts, settings: Settings, difference: timedelta
) -> None:
    made = passed_the_gate(restarts.database, settings)
    with clock_off_by(difference):
        assert promote(restarts.database, settings, made.id, made.incident_id).state == "rolling_out"
    assert restarts.unsettled(settings) == []
    assert restarts.settled(settings, made.id) == "rolling_out"
    serves(restarts.database, NEW)
    assert restarts.unsettled(settings) == [SERVER]
    assert restarts.settled(settings, made.id) == "watching"
    assert restarts.states() == {OLD: "retired", NEW: "in_service"}


@pytest.mark.parametrize("difference", [-TWO_HOURS, TWO_HOURS])
def test_a_rollback_by_a_job_whose_clock_is_wrong_is_not_done_before_the_draft_before_serves(
    restarts: Restarts, settings: Settings, difference: timedelta
) -> None:
    """It served within these two hours: those records do not show that the worse one is gone."""
    run_id = restarts.watched(settings)
    restarts.change(run_id, "watch", verdict="worse")
    with clock_off_by(difference):
        assert restarts.settled(settings, run_id) == "rolling_back"
    assert restarts.unsettled(settings) == []
    serves(restarts.database, NEW)
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert restarts.states() == {OLD: "retired", NEW: "in_service"}
    serves(restarts.database, OLD)
    assert restarts.settled(settings, run_id) == "rolled_back"


@pytest.mark.parametrize("difference", [-TWO_HOURS, TWO_HOURS])
def test_runs_of_a_job_whose_clock_is_wrong_are_dated_as_all_others(
    restarts: Restarts, settings: Settings, difference: timedelta
) -> None:
    """Else it would hide later runs, or end before it began where the sidecar ends it."""
    passed_the_gate(restarts.database, settings)
    before = datetime.now(UTC)
    with clock_off_by(difference):
        nothing = retrain(restarts.database, settings, force=True)
        engine = connect(restarts.database, settings, SERVER)
        job = Job(restarts.database, settings, engine, engine.info(), "nightly", print, lambda: False)
        begun = begin(job, None, 128)
        end(job, begun, None, "rejected", "no gain")
    after = datetime.now(UTC)
    assert nothing.run_id is not None
    for run_id in (nothing.run_id, begun):
        run = restarts.run(run_id)
        assert run.ended_at is not None
        assert before <= run.started_at <= run.ended_at <= after


def test_a_job_whose_clock_is_wrong_does_not_end_what_the_sidecar_has_ordered(
    restarts: Restarts, settings: Settings
) -> None:
    made = passed_the_gate(restarts.database, settings)
    promote(restarts.database, settings, made.id, made.incident_id)
    with clock_off_by(TWO_HOURS):
        assert restarts.settled(settings, made.id) == "rolling_out"
    serves(restarts.database, NEW)
    assert restarts.settled(settings, made.id) == "watching"


def test_a_promotion_is_proved_by_a_server_whose_clock_is_behind(
    restarts: Restarts, settings: Settings
) -> None:
    """Its records end before the order; it never served that draft before."""
    made = passed_the_gate(restarts.database, settings)
    promote(restarts.database, settings, made.id, made.incident_id)
    store(restarts.database, [record(NEW, world.NEW, 0.7, datetime.now(UTC) - TWO_HOURS)])
    assert restarts.unsettled(settings) == [SERVER]
    assert restarts.settled(settings, made.id) == "watching"


def test_a_record_of_the_draft_before_that_comes_late_does_not_prove_a_rollback(
    restarts: Restarts, settings: Settings
) -> None:
    run_id = restarts.watched(settings)
    restarts.change(run_id, "watch", verdict="worse")
    assert restarts.settled(settings, run_id) == "rolling_back"
    store(restarts.database, [record(OLD, world.NEW, 0.7, datetime.now(UTC) - timedelta(minutes=1))])
    assert restarts.unsettled(settings) == []
    assert restarts.settled(settings, run_id) == "rolling_back"


def test_a_rollout_waits_no_longer_where_the_clock_was_set_back(
    restarts: Restarts, settings: Settings
) -> None:
    made = passed_the_gate(restarts.database, settings)
    promote(restarts.database, settings, made.id, made.incident_id)
    asked = retrain_runs.rollout_of(restarts.run(made.id))
    restarts.change(made.id, "rollout", asked_at=asked.asked_at + TWO_HOURS, until=asked.until + TWO_HOURS)
    assert restarts.unsettled(settings) == [SERVER]
    assert restarts.settled(settings, made.id) == "rolling_out"
    assert restarts.unsettled(settings) == []
    again = retrain_runs.rollout_of(restarts.run(made.id))
    assert timedelta(0) <= again.until - asked.until < timedelta(minutes=30)
    serves(restarts.database, NEW)
    assert restarts.settled(settings, made.id) == "watching"


def test_a_rollback_is_proved_after_the_clock_of_the_sidecar_was_set_back(
    restarts: Restarts, settings: Settings
) -> None:
    """Its look-around has moved the times of the streams back by then."""
    run_id = restarts.watched(settings)
    restarts.change(run_id, "watch", verdict="worse")
    settle(restarts.database, settings, SERVER)
    heard = retrain_runs.rollout_of(restarts.run(run_id)).heard
    assert heard is not None
    assert heard.arrived_at is not None
    assert heard.ended_at is not None
    ahead = Heard(heard.arrived_at + TWO_HOURS, heard.ended_at + TWO_HOURS)
    restarts.change(run_id, "rollout", heard=ahead)
    assert restarts.settled(settings, run_id) == "rolling_back"
    serves(restarts.database, NEW)
    assert restarts.settled(settings, run_id) == "rolling_back"
    serves(restarts.database, OLD)
    assert restarts.settled(settings, run_id) == "rolled_back"


def test_a_rollback_that_an_earlier_version_has_ordered_is_proved_by_later_records_alone(
    restarts: Restarts, settings: Settings
) -> None:
    run_id = restarts.watched(settings)
    restarts.change(run_id, "watch", verdict="worse")
    settle(restarts.database, settings, SERVER)
    restarts.change(run_id, "rollout", heard=None)
    assert restarts.settled(settings, run_id) == "rolling_back"
    serves(restarts.database, OLD)
    assert restarts.settled(settings, run_id) == "rolled_back"


def test_a_draft_that_only_canary_probes_told_of_is_not_served(
    restarts: Restarts, settings: Settings
) -> None:
    made = passed_the_gate(restarts.database, settings)
    serves(restarts.database, NEW)
    with restarts.database.session() as session:
        of_new = update(Stream).where(Stream.draft_version == NEW)
        session.execute(of_new.values(traffic_arrived_at=None, traffic_ended_at=None))
    promote(restarts.database, settings, made.id, made.incident_id)
    assert restarts.settled(settings, made.id) == "rolling_out"
    serves(restarts.database, NEW)
    assert restarts.settled(settings, made.id) == "watching"
