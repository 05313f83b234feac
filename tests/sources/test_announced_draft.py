"""A scraped server gets another draft: which of its windows are of which."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from driftguard.app import Sidecar, create_app
from driftguard.settings import ScrapingSettings, Settings, SourceSettings
from driftguard.sources import announced_draft
from driftguard.sources import scrape as scrape_module
from driftguard.sources.announced_draft import AnnouncedDrafts
from driftguard.sources.scrape import open_client, scrape
from driftguard.sources.source import Scraped, Source
from driftguard.store import announced_drafts, sources
from driftguard.store.announced_drafts import Effective
from driftguard.store.database import Database
from driftguard.store.sources import SourceState
from driftguard.store.tables import Record, Stream
from tests.adapters.fake_engines import FakeEngine, FakeLlamaCpp, FakeSGLang, FakeVllm
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import serving
from tests.sources.served import Served, ok, served
from tests.sources.stored import Stored
from tests.sources.test_scrape import STEPS


class World:
    """One server with draft v1 in the settings, scraped by hand."""

    def __init__(self, database: Database, server: Served, engine: FakeEngine) -> None:
        self.database, self.server, self.engine = database, server, engine
        self.stored, self.announced = Stored(), AnnouncedDrafts(database)
        self.begin_anew()

    def begin_anew(self, draft_version: str = "v1") -> None:
        """As a sidecar that starts."""
        settings = SourceSettings(url=self.server.url, server="chat", draft_version=draft_version, target="t")
        self.source = Source.of(settings)
        self.announced = AnnouncedDrafts(self.database)
        self.scrape()

    def scrape(self) -> Scraped:
        self.server.pages["/metrics"] = ok(self.engine.text)
        return self.scrape_as_it_is()

    def scrape_as_it_is(self) -> Scraped:
        async def once() -> Scraped:
            await self.announced.look()
            async with open_client(ScrapingSettings()) as client:
                return await scrape(client, self.source, self.stored.submit, follow=self.announced.follow)

        found = asyncio.run(once())
        self.keep(found)
        return found

    def keep(self, scraped: Scraped) -> None:
        before = self.source.before
        started = before.started_at if before else None
        state = SourceState(
            server="chat", kind=self.source.kind, url=self.server.url, fidelity="counter",
            condition=scraped.condition, detail="", since=scraped.at, scraped_at=scraped.at,
            answered_at=scraped.at, interval_seconds=1.0,
            started_at=datetime.fromtimestamp(started, UTC) if started else None,
        )  # fmt: skip
        with self.database.session() as session:
            sources.store(session, [state])

    def serve(self) -> None:
        self.engine.serve(STEPS)
        self.scrape()

    def restart(self, *, minutes_later: float = 5.0) -> None:
        started = self.engine.started_at
        self.engine = type(self.engine)()
        self.engine.started_at = started + 60.0 * minutes_later

    def announce(self, version: str, effective: Effective = "after_restart") -> None:
        with self.database.session() as session:
            assert announced_drafts.announce(session, "chat", version, effective)

    @property
    def versions(self) -> list[str]:
        return [record.draft_version for record in self.stored.records]


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture(params=[FakeVllm, FakeLlamaCpp])
def world(database: Database, server: Served, request: pytest.FixtureRequest) -> World:
    """llama.cpp does not tell when it started."""
    return World(database, server, request.param())


def serve_much(world: World) -> None:
    """More than the fewest tokens of a window of llama.cpp."""
    world.engine.serve(STEPS * 200)
    world.scrape()


def test_the_next_restart_brings_the_announced_draft(world: World) -> None:
    serve_much(world)
    world.announce("v2")
    serve_much(world)
    world.restart()
    serve_much(world)
    serve_much(world)
    assert world.versions == ["v1", "v1", "v2", "v2"]
    with world.database.session() as session:
        assert announced_drafts.awaited(session) == {}


def test_a_restart_without_traffic_counts_and_a_later_one_changes_nothing(world: World) -> None:
    serve_much(world)
    world.announce("v2")
    world.restart()
    world.scrape()
    serve_much(world)
    world.restart()
    world.scrape()
    serve_much(world)
    assert world.versions == ["v1", "v2", "v2"]


def test_a_restart_shows_before_the_first_request_of_a_server_that_counts_from_it_on(
    database: Database, server: Served
) -> None:
    """It tells no start either, and by the next scrape may have counted more than before."""
    world = World(database, server, FakeSGLang())
    world.serve()
    world.announce("v2")
    world.restart()
    server.pages["/metrics"] = ok(lambda: 'sglang:num_queue_reqs{model_name="m"} 0\n')
    assert world.scrape_as_it_is().condition == "idle"
    world.serve()
    assert world.versions == ["v1", "v2"]


def test_a_sidecar_that_starts_knows_the_draft(world: World) -> None:
    serve_much(world)
    world.announce("v2")
    world.restart()
    world.scrape()
    world.begin_anew()
    serve_much(world)
    assert world.versions == ["v1", "v2"]


def test_settings_that_were_changed_since_win(world: World) -> None:
    world.announce("v2")
    world.restart()
    serve_much(world)
    world.begin_anew(draft_version="v3")
    serve_much(world)
    assert world.versions[-1] == "v3"


def test_an_announcement_that_settings_have_ended_stays_ended(world: World) -> None:
    serve_much(world)
    world.announce("v2")
    world.restart()
    world.scrape()
    world.begin_anew(draft_version="v3")
    world.begin_anew(draft_version="v1")
    serve_much(world)
    assert world.versions == ["v1", "v1"]


def test_a_draft_that_was_taken_back_after_a_restart_with_it_is_told_no_longer(world: World) -> None:
    """A command restarts the server with it, restarts it without, and refuses the order."""
    serve_much(world)
    asked_at = datetime.now(UTC)
    world.announce("v2")
    world.restart()
    world.scrape()
    world.restart()
    world.scrape()
    with world.database.session() as session:
        announced_drafts.withdraw(session, "chat", "v2", "v1", since=asked_at)
        assert announced_drafts.awaited(session) == {}
    serve_much(world)
    serve_much(world)
    assert world.versions == ["v1", "v1"]


@pytest.fixture(params=[-2, 2])
def clock_off(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that scrapes has a wrong clock, by hours; those that announce drafts have the right one."""

    class Off(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(hours=request.param)

    for module in (scrape_module, announced_draft):
        monkeypatch.setattr(module, "datetime", Off)


@pytest.mark.usefixtures("clock_off")
def test_a_draft_is_taken_back_whatever_the_clock_of_the_scraper_says(
    database: Database, server: Served
) -> None:
    world = World(database, server, FakeVllm())
    asked_at = datetime.now(UTC)
    world.announce("v2")
    world.restart()
    world.serve()
    with world.database.session() as session:
        announced_drafts.withdraw(session, "chat", "v2", "v1", since=asked_at)
    world.serve()
    world.serve()
    assert world.versions == ["v2", "v1"]


@pytest.mark.usefixtures("clock_off")
def test_the_window_in_which_a_draft_came_is_left_out_whatever_the_clock_of_the_scraper_says(
    database: Database, server: Served
) -> None:
    world = World(database, server, FakeVllm())
    world.serve()
    world.announce("v2", "now")
    world.serve()
    world.serve()
    assert world.versions == ["v1", "v2"]


def test_a_draft_that_was_loaded_live_is_gone_after_a_restart(world: World) -> None:
    serve_much(world)
    world.announce("v2")
    world.restart()
    world.scrape()
    serve_much(world)
    world.announce("v3", "until_restart")
    world.scrape()
    serve_much(world)
    world.begin_anew()
    serve_much(world)
    world.restart()
    world.scrape()
    serve_much(world)
    assert world.versions == ["v1", "v2", "v3", "v3", "v2"]


def test_nothing_is_announced_of_a_server_whose_metrics_are_pushed(world: World) -> None:
    now = datetime.now(UTC)
    with world.database.session() as session:
        sources.store(
            session,
            [SourceState("pushed", "vllm", sources.PUSHED, None, "reporting", "", now, now, now, 60.0)],
        )
        assert not announced_drafts.announce(session, "pushed", "v2", "after_restart")


def test_a_withdrawn_draft_is_never_told(world: World) -> None:
    serve_much(world)
    world.announce("v2")
    with world.database.session() as session:
        now = datetime.now(UTC)
        announced_drafts.withdraw(session, "chat", "another", "v1", since=now)
        announced_drafts.withdraw(session, "chat", "v2", "v1", since=now)
    world.restart()
    serve_much(world)
    assert world.versions == ["v1"] * len(world.versions)


def test_a_draft_that_is_in_service_already_leaves_the_window_out_in_which_it_came(world: World) -> None:
    serve_much(world)
    world.engine.serve(STEPS * 200)
    world.announce("v2", "now")
    found = world.scrape()
    assert found.detail == "a window was left out: draft v2 came into service in it"
    serve_much(world)
    assert world.versions == ["v1", "v2"]
    assert [record.drafted for record in world.stored.records] == [20 * 200] * 2


def test_a_restart_that_no_sidecar_saw_is_told_by_the_start_of_the_process(
    database: Database, server: Served
) -> None:
    world = World(database, server, FakeVllm())
    world.serve()
    world.announce("v2")
    world.restart()
    world.begin_anew()
    world.serve()
    world.announce("v3")
    world.begin_anew()  # the server has not restarted
    world.serve()
    assert world.versions == ["v1", "v2", "v2"]


def test_while_the_database_is_away_a_restart_waits(world: World) -> None:
    serve_much(world)
    serve_much(world)
    world.announce("v2")
    world.restart()
    world.engine.serve(STEPS * 150)
    world.stored.is_away = True
    assert "not stored yet" in world.scrape().detail
    world.stored.is_away = False
    world.scrape()
    assert world.versions == ["v1", "v1", "v2"]
    assert world.stored.records[-1].drafted == 20 * 150


@contextmanager
def sidecar(database: Database, data_dir: Path, url: str) -> Iterator[httpx.Client]:
    source = {"url": url, "server": "chat", "draft_version": "v1"}
    settings = Settings.model_validate(
        {"data_dir": data_dir, "sources": [source], "scraping": {"interval_seconds": 1.0}}
    )
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        yield client


def test_a_draft_is_announced_by_the_api_and_followed_by_the_sidecar(
    database: Database, tmp_path: Path, server: Served
) -> None:
    engines = [FakeVllm()]
    engines[0].serve(STEPS)

    def text() -> str:
        engines[-1].serve(STEPS)
        return engines[-1].text()

    server.pages["/metrics"] = ok(text)
    with sidecar(database, tmp_path, server.url) as client:
        wait_until(lambda: client.get("/api/v1/status").json()["streams"], "the first window")
        body = {"server": "chat", "draft_version": "v2"}
        answer = client.post("/api/v1/drafts/announce", json=body)
        assert (answer.status_code, answer.json()["effective"]) == (200, "after_restart")
        (told,) = client.get("/api/v1/status").json()["sources"]
        assert told["announced_draft_version"] == "v2"
        assert "Draft v2 is announced" in client.get("/").text
        later = FakeVllm()
        later.started_at = engines[0].started_at + 100.0
        engines.append(later)
        wait_until(lambda: _streams(database) == {"v1", "v2"}, "the new draft")
        (told,) = client.get("/api/v1/status").json()["sources"]
        assert told["announced_draft_version"] is None


def _streams(database: Database) -> set[str]:
    with database.session() as session:
        rows = select(Stream.draft_version).join(Record, Record.stream_id == Stream.id)
        return set(session.scalars(rows.where(Record.drafted > 0)))


def test_what_cannot_be_announced_is_refused_by_name(
    database: Database, tmp_path: Path, server: Served
) -> None:
    server.pages["/metrics"] = ok(FakeVllm().text)
    with sidecar(database, tmp_path, server.url) as client:
        wait_until(lambda: client.get("/api/v1/status").json()["sources"], "the server")

        def refused(status: int, **body: Any) -> str:
            answer = client.post("/api/v1/drafts/announce", json=body)
            assert answer.status_code == status, answer.text
            return str(answer.json())

        there = refused(404, server="caht", draft_version="v2")
        assert "there is no scraped server caht; there are: chat" in there
        assert "draft_version" in refused(422, server="chat", draft_version="")
        assert "effective" in refused(422, server="chat", draft_version="v2", effective="soon")
