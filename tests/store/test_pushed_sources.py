"""Servers whose metrics are pushed, as they are looked at by the clock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text, update

from driftguard.store import sources
from driftguard.store.database import Database
from driftguard.store.sources import FORGOTTEN_AFTER, PUSHED, SourceState
from driftguard.store.tables import Source
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import is_held_up


def test_exports_that_stopped_while_the_clock_was_ahead_are_told_in_time_and_forgotten(
    database: Database,
) -> None:
    now = datetime.now(UTC)
    ahead = now + timedelta(days=30)
    state = SourceState("chat", "vllm", PUSHED, "counter", "reporting", "", ahead, ahead, ahead, 60.0)

    def looked(at: datetime) -> list[tuple[str, datetime, datetime | None]]:
        with database.session() as session:
            found = sources.look_at_pushed(session, PUSHED, at)
            return [(row.condition, row.scraped_at, row.answered_at) for row in found]

    with database.session() as session:
        sources.store_pushed(session, [state])
    assert looked(now) == [("reporting", now, now)]  # the next export may be under way
    assert looked(now + timedelta(minutes=4)) == [("stale", now, now)]
    with database.session() as session:
        session.execute(update(Source).values(scraped_at=now - timedelta(days=2)))
    assert looked(now) == []


@pytest.mark.parametrize("url", [PUSHED, "http://chat"])
def test_a_sidecar_whose_clock_is_days_ahead_forgets_no_server_that_another_one_reads(
    database: Database, url: str
) -> None:
    now = datetime.now(UTC)
    ahead = now + timedelta(days=2)
    read = SourceState("chat", "vllm", url, "counter", "reporting", "", now, now, now, 60.0)
    with database.session() as session:
        sources.store(session, [read])
        sources.store(session, [replace(read, server="code", url="http://code", scraped_at=ahead)])
        sources.look_at_pushed(session, PUSHED, ahead)
        assert [source.server for source in sources.all_sources(session)] == ["chat", "code"]


def test_exports_of_the_same_servers_in_another_order_do_not_wait_for_each_other(database: Database) -> None:
    """As a collector makes them, and two sidecars behind a load balancer take them at the same time."""
    now = datetime.now(UTC)
    states = [
        SourceState(server, "vllm", PUSHED, "counter", "reporting", "", now, now, now, 60.0)
        for server in ("one", "two")
    ]

    def store_in_another_order() -> None:
        with database.session() as session:
            sources.store_pushed(session, states[::-1])

    with ThreadPoolExecutor(1) as threads:
        with database.session() as session:
            sources.store_pushed(session, states[:1])
            stored = threads.submit(store_in_another_order)
            wait_until(lambda: is_held_up(database), "the second to wait for the first")
            sources.store_pushed(session, states[1:])
        stored.result()


@pytest.mark.parametrize("silent_for", [timedelta(minutes=10), timedelta(days=2)])
def test_a_look_waits_for_no_export_that_ends_the_silence_of_several_servers(
    database: Database, silent_for: timedelta
) -> None:
    """Else each could hold a server that the other one waits for."""
    now = datetime.now(UTC)
    before = now - silent_for
    silent = [
        SourceState(server, "vllm", PUSHED, "counter", "reporting", "", before, before, before, 60.0)
        for server in ("one", "two", "three")
    ]
    with database.session() as session:
        sources.store_pushed(session, silent)
    with database.session() as exporting:
        again = [replace(state, since=now, scraped_at=now, answered_at=now) for state in silent[:2]]
        sources.store_pushed(exporting, again)
        with database.session() as looking:
            looking.execute(text("SET LOCAL lock_timeout = '5s'"))
            sources.look_at_pushed(looking, PUSHED, now)
    with database.session() as session:
        found = {row.server: row.condition for row in sources.look_at_pushed(session, PUSHED, now)}
    if silent_for > FORGOTTEN_AFTER:
        assert found == {"one": "reporting", "two": "reporting"}
    else:
        assert found == {"one": "reporting", "two": "reporting", "three": "stale"}
