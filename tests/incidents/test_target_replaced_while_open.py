"""Another target takes over while a fall is open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from driftguard.records.documents.incident import names_of
from driftguard.status.verdict import standings
from driftguard.store.database import Database
from tests.incidents.server import HISTORY, Server, Setup

USUAL = Setup({"chat": 0.75, "code": 0.8}, {"chat": 0.6, "code": 0.4})
FALLEN = replace(USUAL, first={"chat": 0.6, "code": 0.8})
B = "another-target"


def with_open_fall(database: Database, seed: int) -> Server:
    server = Server(database, seed)
    server.send(2_500, USUAL)
    server.send(2 * HISTORY, FALLEN)
    assert (server.fall().state, names_of(server.fall().segments)) == ("open", ("chat",))
    return server


def verdicts(server: Server) -> dict[str, str]:
    with server.database.session() as session:
        return {item.stream.target: item.known_verdict for item in standings(session, server.now)}


@pytest.mark.parametrize("seed", [460])
def test_a_fall_goes_on_with_another_target(database: Database, seed: int) -> None:
    server = with_open_fall(database, seed)
    server.pause(20.0)
    server.send(60, replace(FALLEN, target=B))
    server.look_around()
    assert server.fall().state == "open", server.fall().resolution  # what took over is not known yet
    server.send(2 * HISTORY, replace(FALLEN, target=B))
    server.look_around()
    older, newer = server.falls()
    assert (older.state, newer.state) == ("resolved", "open")
    assert str(newer.id) in str(older.resolution)
    assert names_of(newer.segments) == ("chat",)


@pytest.mark.parametrize("seed", [470])
def test_another_target_that_accepts_as_before_the_fall_ends_it(database: Database, seed: int) -> None:
    server = with_open_fall(database, seed)
    server.pause(20.0)
    server.send(60, replace(USUAL, target=B))
    server.look_around()
    assert server.fall().state == "open", server.fall().resolution
    server.send(2 * HISTORY, replace(USUAL, target=B))
    server.look_around()
    assert (server.fall().state, server.fall().resolution) == (
        "resolved",
        "target target is no longer in service",
    )
    assert verdicts(server)["target"] == "replaced"


def test_a_fall_of_a_target_that_pauses_beside_another_one_stays(database: Database) -> None:
    """A gateway serves both; one is idle for a while."""
    server = Server(database, 480)
    server.send(1_500, USUAL)
    server.send(1_500, replace(USUAL, target=B))
    server.send(1_500, USUAL)
    server.send(2 * HISTORY, FALLEN)
    assert server.fall().state == "open"
    server.pause(20.0)
    server.send(2 * HISTORY, replace(USUAL, target=B))
    server.look_around()
    assert server.fall().state == "open", server.fall().resolution
    assert verdicts(server)["target"] == "degraded"


def test_a_target_that_serves_again_is_in_service_again(database: Database) -> None:
    server = Server(database, 481)
    server.send(1_500, USUAL)
    server.pause(20.0)
    server.send(1_500, replace(USUAL, target=B))
    assert verdicts(server) == {"target": "replaced", B: "steady"}
    server.send(200, USUAL)
    assert verdicts(server)["target"] == "steady"
