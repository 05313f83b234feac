"""Another draft version takes over while a fall is open, or together with another K."""

from __future__ import annotations

from dataclasses import replace

import pytest

from driftguard.records.documents.incident import names_of
from driftguard.store import renamed_segments
from driftguard.store.database import Database
from driftguard.store.tables import Incident
from tests.incidents.server import HISTORY, Server, Setup

USUAL = Setup({"chat": 0.75, "code": 0.8}, {"chat": 0.6, "code": 0.4})
FALLEN = replace(USUAL, first={"chat": 0.6, "code": 0.8})
V2 = "v2"


def with_open_fall(database: Database, seed: int) -> Server:
    server = Server(database, seed)
    server.send(2_500, USUAL)
    server.send(600, FALLEN)
    server.send(2 * HISTORY, FALLEN)
    assert (server.fall().state, names_of(server.fall().segments)) == ("open", ("chat",))
    server.pause(20.0)
    return server


def both(server: Server) -> tuple[Incident, Incident]:
    older, newer = server.falls()
    return older, newer


@pytest.mark.parametrize("k", [4, 6])
@pytest.mark.parametrize("seed", [400])
def test_a_fall_goes_on_with_another_draft(database: Database, seed: int, k: int) -> None:
    server = with_open_fall(database, seed)
    server.send(60, replace(FALLEN, draft_version=V2, k=k))
    server.look_around()
    assert server.fall().state == "open", server.fall().resolution  # what took over is not known yet
    server.send(2 * HISTORY, replace(FALLEN, draft_version=V2, k=k))
    server.look_around()
    older, newer = both(server)
    assert (older.state, newer.state) == ("resolved", "open")
    assert str(newer.id) in str(older.resolution)
    assert names_of(newer.segments) == ("chat",)
    server.send(2 * HISTORY, replace(USUAL, draft_version=V2, k=k))
    assert both(server)[1].state == "resolved"


def test_another_draft_that_accepts_as_before_the_fall_ends_it(database: Database) -> None:
    server = with_open_fall(database, 410)
    server.send(2 * HISTORY, replace(USUAL, draft_version=V2))
    server.look_around()
    assert server.fall().state == "resolved"
    assert server.fall().resolution == "draft v1 is no longer in service"


@pytest.mark.parametrize("seed", [420])
@pytest.mark.parametrize("falls", [False, True])
def test_another_draft_and_another_k_at_once_hide_no_fall_and_make_none(
    database: Database, seed: int, falls: bool
) -> None:
    server = Server(database, seed)
    server.send(2_500, USUAL)
    setup = replace(FALLEN if falls else USUAL, draft_version=V2, k=8)
    server.send(2_000, setup)
    assert [(each.state, names_of(each.segments)) for each in server.falls()] == (
        [("open", ("chat",))] if falls else []
    )
    server.send(2 * HISTORY, replace(USUAL, draft_version=V2, k=8))
    assert all(each.state == "resolved" for each in server.falls())


OF_THREE = Setup({"chat": 0.75, "code": 0.8, "german": 0.7}, {"chat": 0.42, "code": 0.33, "german": 0.25})
CHAT_FALLEN = {**OF_THREE.first, "chat": 0.6}


@pytest.mark.parametrize("seed", [430])
@pytest.mark.parametrize("falls", [False, True])
def test_another_draft_and_another_name_at_once_hide_no_fall_and_make_none(
    database: Database, seed: int, falls: bool
) -> None:
    server = Server(database, seed)
    server.send(2_500, OF_THREE)
    usual = replace(OF_THREE, draft_version=V2, names={"chat": "chat-v2"})
    server.send(2_000, replace(usual, first=CHAT_FALLEN) if falls else usual)
    assert [(each.state, names_of(each.segments)) for each in server.falls()] == (
        [("open", ("chat-v2",))] if falls else []
    )
    server.send(2 * HISTORY, usual)
    assert all(each.state == "resolved" for each in server.falls())


@pytest.mark.parametrize("seed", [440])
def test_a_fall_goes_on_with_another_draft_under_another_name(database: Database, seed: int) -> None:
    server = Server(database, seed)
    server.send(2_500, OF_THREE)
    fallen = replace(OF_THREE, first=CHAT_FALLEN)
    server.send(2 * HISTORY, fallen)
    assert names_of(server.fall().segments) == ("chat",)
    server.pause(20.0)
    server.send(2 * HISTORY, replace(fallen, draft_version=V2, names={"chat": "chat-v2"}))
    server.look_around()
    older, newer = both(server)
    assert (older.state, newer.state) == ("resolved", "open")
    assert str(newer.id) in str(older.resolution)


@pytest.mark.slow
def test_a_rare_segment_of_a_fall_that_goes_on_is_told_as_well(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long after the others are known with the other draft; the fall was as long as what is looked at."""
    monkeypatch.setattr(renamed_segments, "_NEWEST_REQUESTS", 100)
    shares = {"chat": 0.55, "code": 0.4, "rare": 0.05}
    usual = Setup({"chat": 0.75, "code": 0.8, "rare": 0.75}, shares)
    fallen = replace(usual, first={"chat": 0.6, "code": 0.8, "rare": 0.5})
    server = Server(database, 450)
    for _ in range(2):
        server.send(2_500, usual)
    for _ in range(2):
        server.send(2 * HISTORY, fallen)
    assert set(names_of(server.fall().segments)) == {"chat", "rare"}
    server.pause(20.0)
    for _ in range(9):
        server.send(400, replace(fallen, draft_version=V2))
    assert set(names_of(both(server)[1].segments)) == {"chat", "rare"}


@pytest.mark.parametrize("seed", [460])
def test_a_fall_that_is_over_is_not_taken_for_what_another_draft_accepts(
    database: Database, seed: int
) -> None:
    """The drafts are compared again when another segment has a baseline."""
    usual = replace(USUAL, shares={"chat": 0.2, "code": 0.8})
    server = Server(database, seed)
    server.send(3_000, usual)
    server.pause(20.0)
    usual = replace(usual, draft_version=V2)
    server.send(3_000, usual)
    fallen = replace(usual, first=FALLEN.first)
    for _ in range(4):
        server.send(HISTORY, fallen)
    server.send(800, usual)
    server.look()
    assert server.fall().state == "resolved"
    server.send(800, replace(usual, names={"code": "code-2"}))
    server.look()
    assert len(server.falls()) == 1, server.reasons(server.falls()[-1])


@pytest.mark.parametrize("seed", [500])
def test_a_rare_segment_that_fell_with_the_draft_is_told_once_the_others_are_back(
    database: Database, seed: int
) -> None:
    """Its baseline comes when the incident of the others is over."""
    usual = Setup({"chat": 0.75, "rare": 0.75}, {"chat": 0.98, "rare": 0.02})
    server = Server(database, seed)
    for _ in range(3):
        server.send(3_000, usual)
    server.pause(20.0)
    fallen = replace(usual, draft_version=V2, first={"chat": 0.6, "rare": 0.45})
    server.send(800, fallen)
    mended = replace(fallen, first={"chat": 0.75, "rare": 0.45})
    server.send(800, mended)
    assert (server.fall().state, names_of(server.fall().segments)) == ("resolved", ("chat",))
    for _ in range(2):
        server.send(3_000, mended)
    assert [(each.state, names_of(each.segments)) for each in server.falls()] == [
        ("resolved", ("chat",)),
        ("open", ("rare",)),
    ]


@pytest.mark.parametrize("seed", [501])
def test_a_fall_that_was_mended_shortly_before_does_not_hide_that_of_the_next_draft(
    database: Database, seed: int
) -> None:
    server = Server(database, seed)
    server.send(2_500, USUAL)
    server.send(2 * HISTORY, replace(USUAL, first={**USUAL.first, "chat": 0.5}))
    server.send(500, USUAL)
    assert server.fall().state == "resolved"
    server.pause(20.0)
    for _ in range(2):
        server.send(1_500, replace(USUAL, draft_version=V2, first={**USUAL.first, "chat": 0.58}))
    assert [(each.state, names_of(each.segments)) for each in server.falls()] == [
        ("resolved", ("chat",)),
        ("open", ("chat",)),
    ]
