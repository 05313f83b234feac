"""A segment gets another name while its fall is open: the fall goes on under the new name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from driftguard.incidents import silent
from driftguard.records.documents.incident import names_of
from driftguard.store.database import Database
from tests.incidents.server import HISTORY, Server, Setup

SHARES = {"chat": 0.4, "code": 0.35, "german": 0.25}
USUAL = Setup({"chat": 0.75, "code": 0.8, "german": 0.7}, SHARES)
FALLEN = replace(USUAL, first={"chat": 0.6, "code": 0.8, "german": 0.7})
V2, V3 = {"chat": "chat-v2"}, {"chat": "chat-v3"}


def with_open_fall(database: Database, seed: int, usual: Setup = USUAL, fallen: Setup = FALLEN) -> Server:
    server = Server(database, seed)
    server.send(2_500, usual)
    server.send(1_000, fallen)
    assert (server.fall().state, names_of(server.fall().segments)) == ("open", ("chat",))
    return server


@pytest.mark.parametrize("seed", [300])
@pytest.mark.parametrize("k", [4, 6])
def test_a_fall_goes_on_under_another_name(database: Database, seed: int, k: int) -> None:
    """Also where K changes as the name does."""
    server = with_open_fall(database, seed)
    for _ in range(4):
        server.send(HISTORY, replace(FALLEN, names=V2, k=k))
        assert server.fall().state == "open", server.fall().resolution
    assert names_of(server.fall().segments) == ("chat", "chat-v2")
    assert [each for each in server.reasons(server.fall()) if "chat-v2 took the place of chat" in each]
    server.send(HISTORY, replace(USUAL, names=V2, k=k))
    assert server.fall().state == "resolved"
    assert "is back at what it was under the older name: chat-v2 0." in str(server.fall().resolution)


@pytest.mark.slow
def test_a_fall_goes_on_under_a_third_name(database: Database) -> None:
    server = with_open_fall(database, 310)
    for names in (V2, V3):
        for _ in range(3):
            server.send(HISTORY, replace(FALLEN, names=names))
            assert server.fall().state == "open", server.fall().resolution
    server.send(HISTORY, replace(USUAL, names=V3))
    assert server.fall().state == "resolved"
    assert "chat-v3" in str(server.fall().resolution)


def test_another_name_together_with_a_repair_ends_it(database: Database) -> None:
    server = with_open_fall(database, 320)
    for _ in range(3):
        server.send(HISTORY, replace(USUAL, names=V2))
    assert server.fall().state == "resolved"


RARE = {"chat": 0.06, "code": 0.54, "german": 0.4}


@pytest.mark.slow
def test_a_fall_of_a_rare_segment_waits_for_what_took_its_place(database: Database) -> None:
    """The new name has no baseline yet when the old one has been silent for long."""
    usual, fallen = replace(USUAL, shares=RARE), replace(FALLEN, shares=RARE)
    server = Server(database, 330)
    for _ in range(4):
        server.send(2_000, usual)
    for _ in range(3):
        server.send(1_000, fallen)
    assert names_of(server.fall().segments) == ("chat",)
    for _ in range(9):
        server.send(HISTORY, replace(fallen, names=V2))
        assert server.fall().state == "open", server.fall().resolution
    for _ in range(3):
        server.send(2_000, replace(usual, names=V2))
    assert server.fall().state == "resolved"
    assert "under the older name: chat-v2" in str(server.fall().resolution)


@pytest.mark.parametrize("seed", [340])
@pytest.mark.parametrize("falls", [False, True])
def test_another_name_and_another_k_at_once_hide_no_fall_and_make_none(
    database: Database, seed: int, falls: bool
) -> None:
    server = Server(database, seed)
    server.send(2_500, USUAL)
    setup = replace(FALLEN if falls else USUAL, names=V2, k=6)
    server.send(2_500, setup)
    if not falls:
        assert server.falls() == []
        return
    assert (server.fall().state, names_of(server.fall().segments)) == ("open", ("chat-v2",))
    server.send(HISTORY, setup)
    assert server.fall().state == "open"
    server.send(HISTORY, replace(USUAL, names=V2, k=6))
    assert server.fall().state == "resolved"


def test_a_new_name_that_falls_silent_no_longer_holds_it_open(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing takes its place: the others have as much of the traffic as before, and more."""
    monkeypatch.setattr(silent, "REQUESTS", HISTORY)
    server = Server(database, 350)
    server.send(2_500, USUAL)
    server.send(2_500, replace(FALLEN, names=V2))
    assert names_of(server.fall().segments) == ("chat-v2",)
    server.send(HISTORY + 500, replace(USUAL, shares={"code": 0.6, "german": 0.4}))
    assert server.fall().state == "resolved"
    assert server.fall().resolution == "the changed segments (chat-v2) send no traffic any more"


@pytest.mark.parametrize("seed", [360])
def test_a_name_that_is_set_back_does_not_end_a_fall(
    database: Database, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(silent, "REQUESTS", HISTORY)
    server = with_open_fall(database, seed)
    server.send(600, replace(FALLEN, names=V2))
    assert names_of(server.fall().segments) == ("chat", "chat-v2")
    for _ in range(3):
        server.send(HISTORY, FALLEN)
        assert server.fall().state == "open", server.fall().resolution
        assert "It is over" not in server.summary(server.fall())
    server.send(HISTORY, USUAL)
    assert server.fall().state == "resolved"
