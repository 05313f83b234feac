"""Servers whose counters are scraped restart with another draft or target, and the operator says so."""

from __future__ import annotations

import pytest

from driftguard.store.database import Database
from tests.incidents.test_windows_at_another_k import ScrapedServer


def replaced(server: ScrapedServer, what: str) -> None:
    server.restart()
    setattr(server, what, "v2")


@pytest.mark.parametrize("what", ["draft_version", "target"])
@pytest.mark.parametrize(("k", "tells_positions"), [(4, True), (4, False), (6, True)])
def test_a_fall_with_it_is_told_and_ends(
    database: Database, what: str, k: int, tells_positions: bool
) -> None:
    server = ScrapedServer(database, 740 + k, tells_positions=tells_positions)
    server.serve(300, 0.75, 4)
    replaced(server, what)
    server.serve(60, 0.6, k)
    fall = server.sidecar.fall()
    assert fall.state == "open"
    assert "replaced" in server.sidecar.reasons(fall)[0]
    server.serve(200, 0.6, k)
    server.sidecar.look_around()
    assert server.sidecar.fall().state == "open"
    server.serve(100, 0.75, k)
    server.sidecar.look()
    assert server.sidecar.fall().state == "resolved"


@pytest.mark.parametrize("what", ["draft_version", "target"])
@pytest.mark.parametrize("seed", range(750, 751))
def test_without_a_fall_it_is_none(database: Database, what: str, seed: int) -> None:
    server = ScrapedServer(database, seed)
    server.serve(300, 0.7, 4)
    replaced(server, what)
    server.serve(200, 0.7, 6)
    assert not server.sidecar.falls()


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_fall_before_it_goes_on_or_ends(database: Database, goes_on: bool) -> None:
    server = ScrapedServer(database, 760)
    server.serve(300, 0.75, 4)
    server.serve(100, 0.6, 4)
    assert server.sidecar.fall().state == "open"
    replaced(server, "draft_version")
    server.serve(200, 0.6 if goes_on else 0.75, 4)
    server.sidecar.look_around()
    older, *newer = server.sidecar.falls()
    assert older.state == "resolved"
    assert [each.state for each in newer] == (["open"] if goes_on else [])
    if goes_on:
        assert str(newer[0].id) in str(older.resolution)
