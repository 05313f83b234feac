"""A change that repeats one of a week (or a day) before is asked about before it pages a second time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from driftguard.detection import DetectorConfig
from driftguard.errors import BadInput, Conflict
from driftguard.incidents import cost_measurement
from driftguard.incidents.message import summary
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import DetectorState, Incident, Notification
from tests.pipeline.examining import PAGER, fold_and_examine
from tests.pipeline.traffic import Traffic, store

PER_DAY = 240
USUAL, WEEKEND = 0.6, 0.45
TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
MONDAY = TODAY - timedelta(days=15 + (TODAY.weekday() - 15) % 7)  # what is measured is a week old at most
SATURDAY = f"Saturday {MONDAY + timedelta(days=5):%Y-%m-%d}"


class Weeks:
    """One stream from a Monday on, whose acceptance is lower on Saturdays and Sundays."""

    def __init__(
        self, database: Database, *, segments: tuple[str, ...] = ("chat",), per_day: int = PER_DAY
    ) -> None:
        self.database, self.segments, self.per_day = database, segments, per_day
        self.traffic = Traffic(7, MONDAY, seconds_apart=86_400.0 / per_day)
        self.pipeline = Pipeline(database, DetectorConfig(), Metrics())

    def days(self, count: float, rate: float, **others: float) -> None:
        rates = dict.fromkeys(self.segments, rate) | others
        store(self.database, self.traffic.draw(round(count * self.per_day), rates))
        fold_and_examine(self.pipeline, self.database)

    def until_second_saturday(self) -> None:
        self.days(5, USUAL)
        self.days(2, WEEKEND)
        self.days(5, USUAL)

    def measure(self) -> None:
        """As every few minutes, by a clock that agrees with the records'."""
        cost_measurement.refresh(self.database, PAGER, self.traffic.clock)

    def incidents(self) -> list[Incident]:
        with self.database.session() as session:
            return list(session.scalars(select(Incident).order_by(Incident.opened_seq)))

    def told(self) -> list[str]:
        with self.database.session() as session:
            query = select(Notification.event).order_by(Notification.created_at, Notification.id)
            return list(session.scalars(query))

    def text(self, incident: Incident) -> str:
        with self.database.session() as session:
            return summary(*incidents.find(session, incident.id))


def test_the_second_saturday_is_asked_about_and_the_third_is_usual(database: Database) -> None:
    weeks = Weeks(database)
    weeks.until_second_saturday()
    (first,) = weeks.incidents()
    assert (first.severity, first.state) == ("warning", "resolved")
    assert weeks.told() == ["firing", "resolved"]

    weeks.days(0.5, WEEKEND)
    _, second = weeks.incidents()
    assert (second.severity, second.state) == ("info", "open")
    assert weeks.told() == ["firing", "resolved"]
    repeats = second.evidence.repeats
    assert repeats is not None
    assert (repeats.cycle, repeats.incident_id) == ("week", first.id)
    assert f"It looks like that of {SATURDAY}" in weeks.text(second)
    assert "Is it usual on Saturdays?" in weeks.text(second)

    with database.session() as session:
        incidents.take_as_usual(session, second.id, "nobody codes at weekends", datetime.now(UTC))
    weeks.days(1.5, WEEKEND)
    _, second = weeks.incidents()
    assert second.resolution == "the operator said that it is usual on Saturdays: nobody codes at weekends"
    with database.session() as session:
        (state,) = session.scalars(select(DetectorState))
        follows = {one["factor"]: one["by"] for one in state.summary["segments"][0]["follows"]}
        assert follows["week"] == pytest.approx(0.075, abs=0.03)
    for _ in range(2):
        weeks.days(5, USUAL)
        weeks.days(2, WEEKEND)
    assert len(weeks.incidents()) == 2


def test_one_that_outlasts_the_weekend_before_is_a_page(database: Database) -> None:
    weeks = Weeks(database)
    weeks.until_second_saturday()
    weeks.days(2, WEEKEND)
    weeks.measure()
    assert weeks.incidents()[-1].severity == "info"
    weeks.days(1.5, WEEKEND)
    weeks.measure()
    last = weeks.incidents()[-1]
    assert (last.severity, last.state) == ("warning", "open")
    assert sorted(weeks.told()) == ["firing", "firing", "resolved"]
    assert f"it has lasted longer than that of {SATURDAY}" in weeks.text(last)
    assert "usual on Saturdays" not in weeks.text(last)


def test_a_silent_day_a_clock_set_back_and_restarts_leave_the_second_saturday_a_repetition(
    database: Database,
) -> None:
    weeks = Weeks(database)
    for count, rate in ((5, USUAL), (2, WEEKEND), (2, USUAL)):
        weeks.days(count, rate)
        weeks.pipeline = Pipeline(database, DetectorConfig(), Metrics())
    weeks.traffic.clock += timedelta(days=1)
    weeks.days(1, USUAL)
    weeks.traffic.clock -= timedelta(hours=1)
    weeks.days(1, USUAL)
    for _ in range(4):
        weeks.days(0.25, WEEKEND)
        weeks.pipeline = Pipeline(database, DetectorConfig(), Metrics())
        weeks.measure()
    _, second = weeks.incidents()
    assert second.evidence.repeats is not None
    assert (second.severity, second.state) == ("info", "open")
    assert weeks.told() == ["firing", "resolved"]


@pytest.mark.parametrize(
    ("begins", "rate", "others"),
    [
        (0.0, 0.25, {}),  # deeper than that of the weekend before
        (2.0, WEEKEND, {}),  # on a Monday
        (0.0, USUAL, {"code": WEEKEND}),  # in another segment
    ],
)
def test_what_does_not_repeat_the_weekend_before_is_a_page(
    database: Database, begins: float, rate: float, others: dict[str, float]
) -> None:
    weeks = Weeks(database, segments=("chat", "code"))
    weeks.days(5, USUAL)
    weeks.days(2, WEEKEND, code=USUAL)
    weeks.days(5, USUAL)
    if begins:
        weeks.days(begins, USUAL)
    weeks.days(0.8, rate, **({"code": USUAL} | others))
    last = weeks.incidents()[-1]
    assert last.state == "open"
    assert (last.severity in ("warning", "critical"), last.evidence.repeats) == (True, None)


def test_a_day_that_repeats_the_day_before_is_asked_about(database: Database) -> None:
    weeks = Weeks(database, segments=("chat",), per_day=1_200)
    weeks.days(2.4, USUAL)
    weeks.days(0.5, WEEKEND)
    weeks.days(0.5, USUAL)
    weeks.days(0.4, WEEKEND)
    last = weeks.incidents()[-1]
    assert last.evidence.repeats is not None
    assert (last.evidence.repeats.cycle, last.severity) == ("day", "info")
    assert "Is it usual at this hour?" in weeks.text(last)


def test_only_what_repeats_can_be_taken_as_usual_and_for_a_reason(database: Database) -> None:
    weeks = Weeks(database)
    weeks.days(5, USUAL)
    weeks.days(1, WEEKEND)
    (only,) = weeks.incidents()
    now = datetime.now(UTC)
    with pytest.raises(Conflict, match="repeats none before it"), database.session() as session:
        incidents.take_as_usual(session, only.id, "weekends", now)
    with pytest.raises(BadInput, match="reason"), database.session() as session:
        incidents.take_as_usual(session, only.id, " ", now)
    assert weeks.incidents()[0].state == "open"
