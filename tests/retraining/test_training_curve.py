"""What is kept of a training's reports: enough to draw, and never more than a bound."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest

from driftguard.records.documents.retraining_run import TrainingCurve
from driftguard.retraining.ledger.outcome import Progress
from driftguard.retraining.ledger.run_row import Job, ProgressWriter
from driftguard.retraining.ledger.training_curve import MOST_POINTS, with_report
from driftguard.settings import Settings
from driftguard.store.database import Database

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def report(step: int, steps: int = 10**9, **more: Any) -> dict[str, Any]:
    return {"event": "progress", "step": step, "steps": steps, "loss": 1 / step, "acceptance": 0.5} | more


def held_out(step: int, acceptance: float) -> dict[str, Any]:
    return {"event": "held_out", "step": step, "steps": 10**9, "loss": 0.5, "acceptance": acceptance}


def kept(reports: list[dict[str, Any]]) -> TrainingCurve:
    curve = TrainingCurve()
    for number, told in enumerate(reports):
        curve = with_report(curve, told, START + timedelta(seconds=number))
    return curve


def test_a_long_training_is_thinned_evenly_and_its_newest_report_is_always_there() -> None:
    curve, stays = TrainingCurve(), True
    for step in range(1, 10_001):
        before = {point.step for point in curve.training.points[:-1]}
        curve = with_report(curve, report(step), START + timedelta(seconds=step))
        steps = [point.step for point in curve.training.points]
        stays &= len(before - set(steps)) in (0, len(before) // 2)  # all stay until every second one goes
        assert len(steps) <= MOST_POINTS
        assert steps[0] == 1
        assert steps[-1] == step
    assert stays
    assert len(curve.training.points) >= MOST_POINTS / 2
    gaps = [later.step - earlier.step for earlier, later in pairwise(curve.training.points)]
    assert set(gaps[:-1]) == {64}
    last = curve.training.points[-1]
    assert (last.loss, last.acceptance, last.at) == (1e-4, 0.5, START + timedelta(seconds=10_000))


def test_held_out_measurements_are_kept_beside_as_many_reports_as_there_are() -> None:
    reports = [held_out(0, 0.3), *(report(step) for step in range(1, 2_000)), held_out(2_000, 0.7)]
    curve = kept(reports)
    assert [(point.step, point.acceptance) for point in curve.held_out.points] == [(0, 0.3), (2_000, 0.7)]


@pytest.mark.parametrize(
    ("nonsense", "named"),
    [
        (report(5), "step 5 comes after step 20"),
        (report(20), "step 20 comes after step 20"),
        (report(30, steps=25), "step 30 of 25"),
        (report(30, loss=float("nan")), "loss: nan is not a finite number"),
        (report(30, loss=float("-inf")), "loss: -inf is not a finite number"),
        (report(30, loss=None), "Expected `float`, got `null` - at `$.loss`"),
        (report(30, acceptance=1.5), "Expected `float` <= 1.0 - at `$.acceptance`"),
        (report(-3) | {"loss": 1.0}, "Expected `int` >= 0 - at `$.step`"),
        ({"event": "progress", "loss": 1.0}, "Object missing required field `step`"),
    ],
)
def test_a_report_that_makes_no_sense_is_left_out_and_named(nonsense: dict[str, Any], named: str) -> None:
    curve = kept([report(10), report(20), nonsense, nonsense, report(40)])
    assert [point.step for point in curve.training.points] == [10, 20, 40]
    assert curve.left_out == 2
    assert named in (curve.left_out_reason or "")


def test_a_database_that_is_away_for_a_while_does_not_end_a_training() -> None:
    told: list[Progress] = []
    away = Database.open("postgresql://nobody@127.0.0.1:1/nothing")
    job = Job(away, Settings(), Mock(), Mock(), "manual", told.append, lambda: False)
    with ProgressWriter(job, uuid4()) as writer:
        writer(report(1))
        writer(report(2))
    assert [progress.step for progress in told] == [1, 2]
    away.close()
