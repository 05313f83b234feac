"""K changes while a fall is open: it goes on until acceptance is back, at whatever K."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from driftguard.records.documents.incident import names_of, not_back
from driftguard.store.database import Database
from tests.incidents.server import HISTORY, Server, Setup

SHARES = {"chat": 0.6, "code": 0.4}
USUAL = Setup({"chat": 0.75, "code": 0.8}, SHARES)
FALLEN = replace(USUAL, first={"chat": 0.6, "code": 0.8})


def with_open_fall(database: Database, seed: int, usual: Setup, fallen: Setup) -> Server:
    server = Server(database, seed)
    server.send(1_500, usual)
    server.send(1_500, usual)
    server.send(600, fallen)
    assert (server.fall().state, names_of(server.fall().segments)) == ("open", ("chat",))
    return server


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 5, 8])
@pytest.mark.parametrize("tells_positions", [True, False])
def test_a_fall_goes_on_at_another_k(database: Database, k: int, tells_positions: bool) -> None:
    usual, fallen = (replace(setup, tells_positions=tells_positions) for setup in (USUAL, FALLEN))
    server = with_open_fall(database, 200 + k, usual, fallen)
    for _ in range(3):
        server.send(HISTORY, replace(fallen, k=k))
        assert server.fall().state == "open", server.fall().resolution
    server.send(HISTORY, replace(usual, k=k))
    assert server.fall().state == "resolved"
    told = (
        "acceptance of the first draft token is back at what it was before K changed: chat 0.7"
        if tells_positions
        else "acceptance has risen by more than half of the fall since K changed: chat 0."
    )
    assert str(server.fall().resolution).startswith(told)


def test_a_repair_together_with_another_k_ends_it(database: Database) -> None:
    server = with_open_fall(database, 220, USUAL, FALLEN)
    server.send(HISTORY, replace(USUAL, k=6))
    server.look()
    assert server.fall().state == "resolved"


@pytest.mark.parametrize("seed", [230])
def test_k_set_back_and_a_repair_end_it(database: Database, seed: int) -> None:
    server = with_open_fall(database, seed, USUAL, FALLEN)
    server.send(HISTORY, replace(FALLEN, k=5))
    server.send(HISTORY, FALLEN)
    assert server.fall().state == "open"
    server.send(HISTORY, USUAL)
    assert server.fall().state == "resolved"


@pytest.mark.parametrize("seed", [240])
def test_a_fall_goes_on_at_another_temperature_until_the_segment_rises(database: Database, seed: int) -> None:
    """Nothing tells what the segment would accept at that temperature without the fall."""
    server = with_open_fall(database, seed, USUAL, FALLEN)
    for _ in range(3):
        server.send(HISTORY, replace(FALLEN, temperature=0.2))
    assert server.fall().state == "open"
    server.send(HISTORY, replace(FALLEN, first={"chat": 0.65, "code": 0.8}, temperature=0.2))
    assert server.fall().state == "open"
    usual = replace(USUAL, temperature=0.2)
    server.send(HISTORY, usual)
    server.look()
    assert server.fall().state == "resolved"
    assert "has risen by more than half of the fall, with settings that came since" in str(
        server.fall().resolution
    )
    server.send(2_000, usual)
    server.send(1_000, replace(FALLEN, temperature=0.2))
    assert [fall.state for fall in server.falls()] == ["resolved", "open"]


@pytest.mark.slow
def test_a_rise_at_another_temperature_ends_no_fall_that_goes_on_beside_it(database: Database) -> None:
    """Every other request is at the old temperature, and stays fallen."""
    server = with_open_fall(database, 245, USUAL, FALLEN)
    for _ in range(8):
        server.send(150, FALLEN)
        server.send(150, replace(FALLEN, temperature=0.2))
    for _ in range(8):
        server.send(150, FALLEN)
        server.send(150, replace(USUAL, temperature=0.2))
    assert server.fall().state == "open"


@pytest.mark.parametrize("tells_positions", [True, False])
def test_a_second_fall_at_the_new_k_is_told_as_well(database: Database, tells_positions: bool) -> None:
    usual, fallen = (replace(setup, k=5, tells_positions=tells_positions) for setup in (USUAL, FALLEN))
    server = with_open_fall(database, 250, replace(usual, k=4), replace(fallen, k=4))
    server.send(HISTORY, fallen)
    server.send(HISTORY, usual)
    assert server.fall().state == "resolved"
    server.send(2_000, usual)
    server.send(2_000, fallen)
    first, second = server.falls()
    assert (first.state, second.state) == ("resolved", "open")


RENAMED = {"chat": "chat-v2"}
THREE = {"chat": 0.4, "code": 0.35, "german": 0.25}
USUAL_OF_THREE = Setup({"chat": 0.75, "code": 0.8, "german": 0.7}, THREE)
FALLEN_OF_THREE = replace(USUAL_OF_THREE, first={"chat": 0.6, "code": 0.8, "german": 0.7}, names=RENAMED)


@pytest.mark.parametrize("tells_positions", [True, False])
def test_a_segment_that_is_back_at_another_k_is_watched_while_others_are_not(
    database: Database, tells_positions: bool
) -> None:
    """What ends its own fall ends no other's, and does not hide the next one of it."""
    of_three = replace(USUAL_OF_THREE, tells_positions=tells_positions)
    fallen = replace(of_three, first={"chat": 0.6, "code": 0.8, "german": 0.5})
    server = Server(database, 290)
    for setup in (of_three, of_three, fallen):
        server.send(1_500, setup)
    assert set(names_of(server.fall().segments)) == {"chat", "german"}
    server.send(2 * HISTORY, replace(fallen, k=5))
    in_part = replace(fallen, k=5, first={"chat": 0.75, "code": 0.8, "german": 0.5})
    for _ in range(4):
        server.send(HISTORY, in_part)
    assert [(fall.state, names_of(not_back(fall.segments))) for fall in server.falls()] == [
        ("open", ("german",))
    ]
    server.send(500, replace(fallen, k=5))
    assert set(names_of(not_back(server.fall().segments))) == {"german", "chat"}
    told = server.reasons(server.fall())[-1]
    assert told.startswith("acceptance fell in more segments"), told
    for _ in range(3):
        server.send(500, replace(fallen, k=8))
    assert set(names_of(not_back(server.fall().segments))) == {"german", "chat"}


@pytest.mark.slow
@pytest.mark.parametrize("tells_positions", [True, False])
@pytest.mark.parametrize("k", [3, 6])
def test_a_fall_under_another_name_ends_at_another_k(
    database: Database, k: int, tells_positions: bool
) -> None:
    """The name changes as it falls, and K after that."""
    usual, fallen = (
        replace(setup, tells_positions=tells_positions) for setup in (USUAL_OF_THREE, FALLEN_OF_THREE)
    )
    server = Server(database, 260 + k)
    server.send(2_500, usual)
    server.send(2_500, fallen)
    assert names_of(server.fall().segments) == ("chat-v2",)
    for _ in range(3):
        server.send(HISTORY, replace(fallen, k=k))
        assert server.fall().state == "open", server.fall().resolution
    server.send(HISTORY, replace(usual, k=k, names=RENAMED))
    assert server.fall().state == "resolved"


def test_a_fall_under_another_name_goes_on_as_it_is_verified_by_blocks(database: Database) -> None:
    """That accepts more of all positions than the segment did before it fell, and as much of the first."""
    usual, fallen = (replace(setup, verification="token") for setup in (USUAL_OF_THREE, FALLEN_OF_THREE))
    server = Server(database, 280)
    server.send(2_500, usual)
    server.send(2_500, fallen)
    assert names_of(server.fall().segments) == ("chat-v2",)
    by_blocks = replace(fallen, verification="block", later=0.9)
    for _ in range(3):
        server.send(HISTORY, by_blocks)
        assert server.fall().state == "open", server.fall().resolution
    server.send(2 * HISTORY, replace(by_blocks, first=usual.first))
    server.look()
    assert server.fall().state == "resolved"


def test_a_fall_whose_name_changed_later_is_held_against_what_was_before_it_at_another_k(
    database: Database,
) -> None:
    """Not against what the older name accepted while it was fallen."""
    server = Server(database, 300)
    for setup in (USUAL_OF_THREE, USUAL_OF_THREE, replace(FALLEN_OF_THREE, names={})):
        server.send(1_500, setup)
    server.send(2_500, FALLEN_OF_THREE)
    assert names_of(not_back(server.fall().segments)) == ("chat-v2",)
    server.send(2 * HISTORY, replace(FALLEN_OF_THREE, k=6))
    (renamed,) = not_back(server.fall().segments)
    assert renamed.across_settings is not None
    assert renamed.across_settings.positions == "first"
    assert renamed.across_settings.before == pytest.approx(0.75, abs=0.03)
    assert renamed.across_settings.after == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize("seed", [502])
def test_a_fall_that_is_over_is_not_taken_for_what_another_k_accepts(database: Database, seed: int) -> None:
    """What was served at either K is compared again when a rare segment has a baseline at the new one."""
    usual = Setup({"chat": 0.75, "rare": 0.75}, {"chat": 0.97, "rare": 0.03})
    server = Server(database, seed)
    for _ in range(3):
        server.send(3_000, usual)
    usual = replace(usual, k=5)
    server.send(1_200, usual)
    for _ in range(3):
        server.send(700, replace(usual, first={"chat": 0.55, "rare": 0.75}))
    server.send(150, usual)
    for _ in range(6):
        server.send(60, usual)
    assert server.fall().state == "resolved", server.reasons(server.fall())


@pytest.mark.parametrize("seed", [1])
def test_users_who_wandered_at_the_k_before_are_not_taken_for_independent(
    database: Database, seed: int
) -> None:
    """Such a wave is none of acceptance that is back: its mean is below the midpoint."""
    server, rng, mood = Server(database, seed), np.random.default_rng(seed), 0.0
    usual = Setup({"chat": 0.75}, {"chat": 1.0})
    kept = math.exp(-150 / 500)
    for _ in range(25):
        mood = kept * mood + 0.035 * math.sqrt(1 - kept**2) * rng.normal()
        server.send(150, replace(usual, first={"chat": 0.75 + mood}))
    server.send(300, replace(usual, k=5, first={"chat": 0.55}))
    for _ in range(4):
        server.send(100, replace(usual, k=5, first={"chat": 0.71}))
    assert server.fall().state == "open", server.fall().resolution
