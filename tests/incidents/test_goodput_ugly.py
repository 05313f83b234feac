"""The watch over goodput on ugly traffic: silent hours, a clock that goes back, what acceptance explains."""

from __future__ import annotations

from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store.database import Database
from tests.incidents.test_goodput import Served, found, look, reasons
from tests.pipeline.examining import fold_and_examine

HOUR = 3_600.0


def test_silent_hours_and_a_clock_that_goes_back_are_no_fall_and_hide_none(database: Database) -> None:
    served = Served(database, 31, hours=40.0)
    for _ in range(4):
        served.serve(2.5)
        served.machine.clock += 5.0 * HOUR
    served.serve(1.0)
    served.machine.clock -= HOUR
    served.serve(2.0)
    assert found(database) == []
    served.machine.slower = 1.8
    served.serve(0.5)
    served.machine.clock += 3.0 * HOUR
    served.serve(1.0)
    served.machine.clock -= HOUR
    for _ in range(4):
        served.serve(0.5)
    ((incident, _),) = found(database)
    assert (incident.state, len(reasons(database, incident))) == ("open", 1)
    served.machine.slower = 1.0
    served.machine.clock += 2.0 * HOUR
    served.serve(2.0)
    ((incident, _),) = found(database)
    assert incident.resolution == "tokens come as fast again as before at the same load"


def test_a_fall_that_acceptance_explained_leaves_no_incident_behind_when_it_is_over(
    database: Database,
) -> None:
    """Tokens came slower for hours, told by the incident of acceptance; both are back together."""
    served = Served(database, 32, hours=30.0)
    pipeline = Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics())
    served.serve(6.0)
    served.machine.acceptance = 0.2
    for _ in range(6):
        served.serve(0.5)
        fold_and_examine(pipeline, database)
    served.machine.acceptance = 0.7
    for _ in range(4):
        served.serve(0.25)
        fold_and_examine(pipeline, database)
        look(database)
    assert [(one.direction, one.state) for one, _ in found(database)] == [("down", "resolved")]
    served.machine.slower = 1.8  # what was usual before the fall is still known
    served.serve(1.5)
    assert {(one.direction, one.state) for one, _ in found(database)} == {
        ("down", "resolved"),
        ("slower", "open"),
    }
