"""A server that restarts as it was, or with another name of a segment and another K, and falls or does not.
(One of the two alone: test_renamed_while_open.py, test_k_changes_while_open.py.)

The traffic is ugly: a rare segment, hours and minutes of silence, a clock that is set back and ahead, a
restart within the reference period. A fall is told once, and ends when it is mended and not before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from driftguard.store.database import Database
from tests.incidents.server import Server, Setup

USUAL = Setup(
    {"chat": 0.75, "code": 0.8, "german": 0.7, "rare": 0.6},
    {"chat": 0.42, "code": 0.33, "german": 0.23, "rare": 0.02},
)
FIRST_FALLEN = {**USUAL.first, "chat": 0.6}
CHANGES = {
    "restart": USUAL,
    "name and k": replace(USUAL, names={"chat": "chat-v2"}, k=6),
}


@dataclass(frozen=True, slots=True)
class Told:
    """How many falls were told by then, and how many of them are not over."""

    falls: int
    unresolved: int

    @classmethod
    def of(cls, server: Server) -> Told:
        falls = server.falls()
        return cls(len(falls), sum(each.state != "resolved" for each in falls))


def restart(server: Server, setup: Setup) -> None:
    """After it the server is silent for half an hour once, and its clock is set twice."""
    server.pause(4.0, clock_set=-45.0)
    for minutes, clock_set in ((0.0, 0.0), (30.0, 0.0), (2.0, -20.0), (1.0, 90.0)):
        server.pause(minutes, clock_set=clock_set)
        server.send(800, setup)


def restarted(server: Server, setup: Setup) -> None:
    """Usual traffic, then a restart after which it is served as `setup` says."""
    server.send(300, USUAL)
    server.pause(7.0, clock_set=-60.0)  # within the reference period
    server.send(1_200, USUAL)
    server.pause(180.0)
    server.send(1_500, USUAL)
    restart(server, setup)


def lived(server: Server, change: str, *, falls: bool) -> tuple[Told, Told, Told]:
    """After the restart, after more of the same, and after the draft was mended."""
    usual = CHANGES[change]
    setup = replace(usual, first=FIRST_FALLEN) if falls else usual
    restarted(server, setup)
    told = [Told.of(server)]
    server.pause(15.0, clock_set=-10.0)
    server.send(1_200, setup)
    server.send(1_200, setup)
    told.append(Told.of(server))
    server.pause(3.0)
    server.send(1_500, usual)
    server.send(1_500, usual)
    told.append(Told.of(server))
    return told[0], told[1], told[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [500])
@pytest.mark.parametrize("change", CHANGES)
def test_a_fall_with_a_restart_is_told_once_and_ends_when_it_is_mended(
    database: Database, change: str, seed: int
) -> None:
    assert lived(Server(database, seed), change, falls=True) == (Told(1, 1), Told(1, 1), Told(1, 0))


@pytest.mark.parametrize("seed", [510])
@pytest.mark.parametrize("change", CHANGES)
def test_a_restart_without_a_fall_tells_none(database: Database, change: str, seed: int) -> None:
    assert lived(Server(database, seed), change, falls=False) == (Told(0, 0),) * 3


def changed_while_open(server: Server, change: str) -> tuple[Told, Told, Told]:
    """A fall first, and the restart after it: as it fell, after the restart, and after it was mended."""
    usual = CHANGES[change]
    fallen = replace(usual, first=FIRST_FALLEN)
    restarted(server, replace(USUAL, first=FIRST_FALLEN))
    told = [Told.of(server)]
    restart(server, fallen)
    told.append(Told.of(server))
    server.send(1_500, usual)
    server.send(1_500, usual)
    told.append(Told.of(server))
    return told[0], told[1], told[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [520])
@pytest.mark.parametrize("change", CHANGES)
def test_a_fall_that_is_open_goes_on_after_a_restart(database: Database, change: str, seed: int) -> None:
    assert changed_while_open(Server(database, seed), change) == (Told(1, 1), Told(1, 1), Told(1, 0))
