"""New incidents on a real database: stored by the fold, examined after it, told once and with their cause."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from driftguard.detection import DetectorConfig
from driftguard.errors import DatabaseUnavailable
from driftguard.incidents import cost_measurement, diagnosing, examination, target_replaced
from driftguard.incidents.examination import LOOP, Examiner
from driftguard.incidents.message import summary
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records.documents.incident import IncidentDiagnosis
from driftguard.retraining.due import why_not
from driftguard.status.gauges import refresh
from driftguard.store import folding, incidents
from driftguard.store.database import EXAMINATION, Database, DatabaseTimeout, Work
from driftguard.store.tables import Incident, Notification, Stream
from tests.pipeline.examining import PAGER, examine
from tests.pipeline.traffic import Traffic, store

GOOD = {"code": 0.75, "german": 0.7}
BAD = {"code": 0.75, "german": 0.35}


class World:
    """A pipeline and an examiner, of which neither runs by itself."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.traffic = Traffic(seed=1)
        self.metrics = Metrics()
        self.pipeline = Pipeline(database, DetectorConfig(minimum_drop=0.1), self.metrics)
        self.examiner = Examiner(database, self.metrics, minimum_drop=0.1, paging=PAGER)

    def fold(self, count: int, rates: dict[str, float]) -> None:
        store(self.database, self.traffic.draw(count, rates))
        while self.pipeline.fold_batch():
            pass

    def fallen(self) -> World:
        self.fold(1_000, GOOD)
        self.fold(300, BAD)
        return self

    def incident(self) -> tuple[Incident, Stream]:
        with self.database.session() as session:
            ((incident, stream),) = incidents.list_page(session, limit=10)
            return incident, stream

    def told(self) -> list[tuple[str, str]]:
        with self.database.session() as session:
            rows = session.scalars(select(Notification).order_by(Notification.id))
            return [(row.event, row.severity) for row in rows]

    def severities(self) -> list[str]:
        with self.database.session() as session:
            ((incident, _),) = incidents.list_page(session, limit=10)
            return [severity for severity, _ in incidents.severities(session, [incident.id])[incident.id]]

    def shown(self, severity: str) -> float | None:
        """How many Prometheus pages by, at the next look."""
        with self.database.session() as session:
            refresh(session, self.metrics, [], [], PAGER.destinations, datetime.now(UTC))
        labels = {"severity": severity, "direction": "down"}
        return self.metrics.registry.get_sample_value("driftguard_incidents_open", labels)

    def failures(self) -> float | None:
        return self.metrics.registry.get_sample_value("driftguard_loop_failures_total", {"loop": LOOP})


def _fail(*_: object) -> None:
    raise ValueError("planted")


def test_what_the_fold_found_is_told_once_and_only_with_its_cause(database: Database) -> None:
    world = World(database).fallen()
    incident, _ = world.incident()
    assert (incident.awaits_examination, incident.severity, incident.diagnosis) == (True, "info", None)
    assert (world.told(), world.shown("info"), world.shown("critical")) == ([], 0, 0)
    assert why_not(incident.diagnosis, "low") == "its cause has not been examined yet"

    examine(database)  # by a process that did not fold it
    incident, stream = world.incident()
    assert (incident.awaits_examination, incident.severity) == (False, "critical")
    assert incident.interval_start_at < incident.change_point_at < incident.interval_end_at
    assert "by formula" in summary(incident, stream) or "measured" in summary(incident, stream)
    assert "The cause is not known" in summary(incident, stream)
    assert world.severities() == ["critical"]
    assert world.shown("critical") == 1

    examine(database)
    world.examiner.announce_overdue(datetime.now(UTC) + timedelta(hours=1))
    assert world.told() == [("firing", "critical")]


def test_a_comparison_that_is_too_early_is_not_asked_again_at_once_and_holds_up_no_incident(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(database).fallen()
    incident, _ = world.incident()
    with database.session() as session:
        incidents.note_comparison(session, incident.stream_id, incident.opened_seq, incident.opened_at)
    awaits = []

    def too_early(*_: Any) -> bool:
        awaits.append(world.incident()[0].awaits_examination)
        return False

    monkeypatch.setattr(target_replaced, "compare", too_early)
    for _ in range(2):
        world.examiner.examine(datetime.now(UTC))
    assert awaits == [False]


def test_a_harmless_cause_is_never_told_as_anything_else(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(database).fallen()
    made = diagnosing.diagnosed

    def harmless(*arguments: Any) -> IncidentDiagnosis:
        return replace(made(*arguments), cause="configuration", confidence="high")

    monkeypatch.setattr(diagnosing, "diagnosed", harmless)
    world.examiner.examine(datetime.now(UTC))
    assert (world.severities(), world.told()) == (["info"], [])


def test_an_examination_that_fails_delays_no_page_and_no_fold(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(database).fallen()
    opened_at = world.incident()[0].opened_at

    with monkeypatch.context() as patched:
        patched.setattr(diagnosing, "records_around", _fail)
        world.examiner.examine(opened_at)
        world.examiner.examine(opened_at)  # too soon: it is not tried again yet
        assert world.failures() == 1
        world.examiner.announce_overdue(opened_at + examination.PATIENCE - timedelta(seconds=1))
        assert world.told() == []
        world.examiner.announce_overdue(opened_at + examination.PATIENCE)
        assert world.told() == [("firing", "critical")]
        incident, stream = world.incident()
        assert summary(incident, stream).endswith(". Its cause has not been examined yet.")
        assert world.shown("critical") == 1
        world.fold(200, BAD)
        with database.session() as session:
            assert folding.unfolded(session) == 0

    examine(database)
    incident, stream = world.incident()
    assert incident.diagnosis is not None
    assert world.severities() == ["critical"]
    assert world.told() == [("firing", "critical")]


def test_a_page_without_a_cause_is_as_grave_as_the_fall_costs_by_formula_and_comes_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that takes long is asked for it: the records are not read."""
    world = World(database).fallen()
    with monkeypatch.context() as patched:
        patched.setattr(cost_measurement, "at_change", _fail)
        world.examiner.examine(datetime.now(UTC))
        world.examiner.announce_overdue(datetime.now(UTC) + examination.PATIENCE)
        incident, stream = world.incident()
        assert (incident.severity, world.told()) == ("critical", [("firing", "critical")])
        assert "% slower (by formula). " in summary(incident, stream)
        assert summary(incident, stream).endswith(". Its cause has not been examined yet.")

    examine(database)
    assert world.incident()[0].diagnosis is not None
    assert (world.severities(), world.told()) == (["critical"], [("firing", "critical")])


def test_a_page_without_a_cause_comes_although_the_database_is_too_slow_to_say_what_it_costs(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(database).fallen()
    impatient = Work("check", statement_seconds=1.0, lock_seconds=0.5, idle_seconds=60.0)
    monkeypatch.setattr(examination, "CHECK", impatient)
    with database.session() as other:
        other.execute(text("LOCK TABLE rollups_1m IN ACCESS EXCLUSIVE MODE"))
        world.examiner.announce_overdue(datetime.now(UTC) + examination.PATIENCE)
    assert (world.told(), world.failures()) == ([("firing", "warning")], 1)
    examine(database)
    incident, stream = world.incident()
    assert world.severities() == ["warning", "critical"]
    assert "Now critical: examined late: the cause is not known." in summary(incident, stream)


def test_a_database_that_goes_silent_meanwhile_is_an_outage_and_no_failure_of_the_examination(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its primary is frozen: the incident is examined as soon as another one answers."""
    world = World(database).fallen()

    def silent(*_: object) -> None:
        raise DatabaseTimeout("there was no answer for 20 s", EXAMINATION, "silence")

    with monkeypatch.context() as patched:
        patched.setattr(diagnosing, "records_around", silent)
        with pytest.raises(DatabaseUnavailable, match="no answer"):
            world.examiner.examine(datetime.now(UTC))
    assert not world.failures()
    world.examiner.examine(datetime.now(UTC))
    assert world.told() == [("firing", "critical")]


def test_the_fold_goes_on_while_an_examination_hangs(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds a table that only the examination reads."""
    world = World(database).fallen()
    impatient = Work("examination", statement_seconds=1.0, lock_seconds=0.0, idle_seconds=60.0)
    monkeypatch.setattr(examination, "EXAMINATION", impatient)
    with database.session() as other, ThreadPoolExecutor(1) as threads:
        other.execute(text("LOCK TABLE captures IN ACCESS EXCLUSIVE MODE"))
        examining = threads.submit(world.examiner.examine, datetime.now(UTC))
        world.fold(200, BAD)
        examining.result()
        assert world.failures() == 1
        with database.session() as session:
            assert folding.unfolded(session) == 0
    assert world.incident()[0].awaits_examination
    examine(database)
    assert world.told() == [("firing", "critical")]


def test_what_is_over_before_it_is_examined_is_told_with_its_end(database: Database) -> None:
    world = World(database).fallen()
    world.fold(1_200, GOOD)
    assert world.incident()[0].state == "resolved"
    assert world.told() == []
    examine(database)
    assert world.told() == [("firing", "critical"), ("resolved", "critical")]


def test_what_is_over_before_its_cause_was_examined_promises_none(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(database).fallen()
    with monkeypatch.context() as patched:
        patched.setattr(diagnosing, "records_around", _fail)
        world.examiner.examine(datetime.now(UTC))
        world.examiner.announce_overdue(datetime.now(UTC) + examination.PATIENCE)
        world.fold(1_200, GOOD)
    examine(database)
    incident, stream = world.incident()
    assert (incident.state, incident.diagnosis) == ("resolved", None)
    text = summary(incident, stream)
    assert "yet" not in text
    assert " It was over before its cause was examined. It lasted " in text


def test_an_examination_that_loses_its_database_after_any_commit_is_told_once_by_the_next(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, session, left = World(database).fallen(), Database.session, 0

    @contextmanager
    def cut_off(own: Database, *work: Work) -> Iterator[Session]:
        nonlocal left
        with session(own, *work) as opened:
            yield opened
        left -= 1
        if left == 0:
            raise DatabaseUnavailable("the answer to the commit was lost")

    monkeypatch.setattr(Database, "session", cut_off)
    for commits in range(1, 8):
        left = commits
        with suppress(DatabaseUnavailable):
            examine(database)
    assert left > 0  # the last one had fewer: it was cut off after each
    assert world.told() == [("firing", "critical")]
    assert world.severities() == ["critical"]


def test_sidecars_that_examine_at_the_same_time_tell_it_once(database: Database) -> None:
    world = World(database).fallen()
    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(examine, database) for _ in range(3)]:
            done.result()
    assert world.told() == [("firing", "critical")]
    assert world.severities() == ["critical"]


def test_a_page_does_not_wait_until_a_clock_that_was_set_back_has_caught_up(database: Database) -> None:
    world = World(database).fallen()
    opened_at = world.incident()[0].opened_at
    world.examiner.announce_overdue(opened_at - examination.PATIENCE)
    assert world.told() == []  # the clocks of two sidecars may differ by seconds
    world.examiner.announce_overdue(opened_at - timedelta(hours=1))
    assert world.told() == [("firing", "critical")]
