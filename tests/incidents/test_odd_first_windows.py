"""A server is first scraped in an odd minute: no level is called normal that does not match the baseline."""

from __future__ import annotations

from sqlalchemy import select

from driftguard.status.gather import gather
from driftguard.store.database import Database
from driftguard.store.tables import Incident
from tests.incidents.test_windows_at_another_k import ScrapedServer

K = 1


def test_a_rise_that_ends_between_is_not_called_back_at_the_baseline(database: Database) -> None:
    server = ScrapedServer(database, 770)
    server.serve(14, 0.1, K)
    server.serve(20, 0.5, K)
    server.serve(20, 0.18, K)
    with database.session() as session:
        rise = session.scalars(select(Incident).order_by(Incident.opened_at)).first()
    assert rise is not None
    assert (rise.direction, rise.state) == ("up", "resolved")
    assert str(rise.resolution).startswith("acceptance is back by more than half of the change: default 0.1")
    assert str(rise.resolution).endswith(", baseline 0.10")


def test_a_level_off_the_baseline_is_not_called_steady(database: Database) -> None:
    """So few windows above it raise no alarm yet."""
    server = ScrapedServer(database, 771)
    server.serve(14, 0.1, K)
    server.serve(12, 0.17, K)
    with database.session() as session:
        (found,) = gather(session, server.clock)
    assert found.incident_id is None
    assert found.text.startswith("No alarm, but off the baseline: acceptance 0.1")


def test_a_fall_from_what_followed_is_paged(database: Database) -> None:
    server = ScrapedServer(database, 772)
    server.serve(14, 0.04, K)
    server.serve(90, 0.57, K)
    server.serve(12, 0.14, K)
    fall = server.sidecar.fall()
    assert (fall.direction, fall.state, fall.severity) == ("down", "open", "critical")
