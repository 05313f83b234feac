"""The scraping of a whole sidecar: what its status says of the servers, and what it takes for no failure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from driftguard.api.status import source_models
from driftguard.app import Sidecar, create_app
from driftguard.settings import Settings
from driftguard.sources import scrape_loop
from driftguard.sources.scrape import scrape
from driftguard.sources.source import Scraped
from driftguard.store import sources as stored
from driftguard.store.database import Database
from driftguard.store.tables import Record, ServerStart, Source
from tests.adapters.fake_engines import FakeVllm
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import serving
from tests.conftest import PATIENCE_SECONDS
from tests.sources.served import Served, ok, served
from tests.sources.test_scrape import of_a_start_without_speculation


@contextmanager
def sidecar(
    database: Database, data_dir: Path, sources: list[dict[str, Any]], **other: Any
) -> Iterator[httpx.Client]:
    settings = Settings.model_validate(
        {"data_dir": data_dir, "sources": sources, "scraping": {"interval_seconds": 1.0}} | other
    )
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        yield client


def until(client: httpx.Client, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds(status := client.get("/api/v1/status").json()):
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return dict(status)


def shows(client: httpx.Client, *samples: str) -> bool:
    """Whether its metrics have these lines."""
    return set(samples) <= set(client.get("/metrics").text.splitlines())


def condition(status: dict[str, Any]) -> str | None:
    """Of the first server, once it is known."""
    return next((str(item["condition"]) for item in status["sources"]), None)


def verdict(status: dict[str, Any]) -> str:
    """Of the first stream."""
    return str(status["streams"][0]["verdict"])


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def test_the_status_names_every_server_and_what_to_do_and_a_failure_is_counted_and_outlived(
    database: Database, tmp_path: Path, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeVllm()

    def text() -> str:
        engine.serve([4, 0, 3, 1])
        return engine.text()

    server.pages |= {"/metrics": ok(text), "/version": ok(lambda: '{"version": "0.32.0"}')}
    sources = [
        {"url": server.url, "server": "chat"},
        {"url": f"{server.url}/sglang", "server": "code", "kind": "sglang"},
    ]
    failures = iter([RuntimeError("nobody foresaw it")])
    failures_to_store = iter([RuntimeError("nor that")])

    async def failing_once(*arguments: Any) -> Scraped:
        for failure in failures:
            raise failure
        return await scrape(*arguments)

    def stored_at_last(session: Session, states: Sequence[stored.SourceState]) -> None:
        for failure in failures_to_store:
            raise failure
        store(session, states)

    store = stored.store
    monkeypatch.setattr(scrape_loop, "scrape", failing_once)
    monkeypatch.setattr(stored, "store", stored_at_last)
    with sidecar(database, tmp_path, sources) as client:
        status = until(
            client,
            lambda status: (
                bool(status["streams"])
                and [source["condition"] for source in status["sources"]] == ["reporting", "metrics_hidden"]
            ),
        )
        with database.session() as session:
            told = session.scalars(select(ServerStart)).one()
        assert told.server == "chat"
        assert told.started_at.timestamp() == pytest.approx(engine.started_at)
        chat, code = status["sources"]
        assert (chat["server"], chat["kind"], chat["fidelity"], chat["detail"]) == (
            "chat",
            "vllm",
            "counter",
            "",
        )
        assert (chat["version"], code["version"]) == ("0.32.0", None)
        assert (code["condition"], code["answered_at"]) == ("metrics_hidden", code["scraped_at"])
        assert "--enable-metrics" in code["detail"]
        assert status["streams"][0]["server"] == "chat"
        page, metrics = client.get("/").text, client.get("/metrics").text
        assert "--enable-metrics" in page
        assert 'driftguard_source_up{kind="vllm",source="chat"} 1.0' in metrics
        assert 'driftguard_loop_failures_total{loop="scraping"} 2.0' in metrics
        assert client.get("/readyz").json()["status"] == "ready"


def test_a_start_time_that_is_none_costs_no_windows(
    database: Database, tmp_path: Path, server: Served
) -> None:
    """As of a gateway that tells it in milliseconds."""
    engine = FakeVllm(started_at=1_750_000_000_000.0)

    def text() -> str:
        engine.serve([2] * 10)
        return engine.text()

    server.pages["/metrics"] = ok(text)
    with sidecar(database, tmp_path, [{"url": server.url, "server": "chat"}]) as client:
        until(client, lambda status: condition(status) == "reporting" and bool(status["streams"]))


def test_the_log_says_once_that_drafting_stopped_however_many_tokens_each_window_has(
    database: Database, tmp_path: Path, server: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = FakeVllm()
    engine.serve([2] * 100)
    lengths = iter(range(1, 1_000))

    def text() -> str:
        engine.plain_tokens += next(lengths)
        return engine.text()

    server.pages["/metrics"] = ok(text)
    unprobed = {"probes": {"enabled": False}}  # a window with a probe in it is no news of drafting
    with sidecar(database, tmp_path, [{"url": server.url, "server": "chat"}], **unprobed) as client:
        details: set[str] = set()

        def are_three(status: dict[str, Any]) -> bool:
            details.update(
                one["detail"] for one in status["sources"] if one["condition"] == "drafting_stopped"
            )
            return len(details) == 3

        until(client, are_three)
    assert capfd.readouterr().out.count("without a draft since the last window") == 1


def test_a_server_that_drafted_before_the_sidecar_started_has_stopped_drafting(
    database: Database, tmp_path: Path, server: Served
) -> None:
    """As on a machine that was restarted, with both; its vLLM now without --speculative-config."""
    engine = FakeVllm()
    server.pages["/metrics"] = ok(engine.text)
    settings = [{"url": server.url, "server": "chat"}]
    with sidecar(database, tmp_path, settings) as client:
        until(client, lambda status: condition(status) is not None)
        engine.serve([2] * 100)
        until(client, lambda status: bool(status["streams"]))
    engine.restart(at=engine.started_at + 3_600)

    def text() -> str:
        engine.plain_tokens += 50
        return of_a_start_without_speculation(engine)

    server.pages["/metrics"] = ok(text)
    with sidecar(database, tmp_path, settings) as client:
        until(client, lambda status: condition(status) == "drafting_stopped")


def test_an_idle_server_is_not_stale_and_one_that_is_gone_is(
    database: Database, tmp_path: Path, server: Served
) -> None:
    engine = FakeVllm(running=0)
    engine.serve([2] * 100)
    server.pages["/metrics"] = ok(engine.text)
    with sidecar(database, tmp_path, [{"url": server.url, "server": "chat"}]) as client:
        until(client, lambda status: bool(status["sources"]))
        engine.serve([2] * 100)
        until(client, lambda status: stored_steps(database) == 100)  # and no more will come
        hours_ago = datetime.now(UTC) - timedelta(hours=6)
        with database.session() as session:
            connection = session.connection().connection.driver_connection
            assert connection is not None
            connection.execute(
                "UPDATE streams SET traffic_arrived_at = %s, traffic_ended_at = %s", (hours_ago, hours_ago)
            )
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        status = until(
            client,
            lambda status: condition(status) == "idle" and status["sources"][0]["scraped_at"] > now,
        )
        assert verdict(status) == "insufficient_data"
        server.pages.clear()
        assert verdict(until(client, lambda status: condition(status) == "metrics_hidden")) == "stale"


def test_a_restart_of_the_sidecar_forgets_neither_which_engine_is_down_nor_since_when(
    database: Database, tmp_path: Path
) -> None:
    engine = FakeVllm(running=0)
    engine.serve([2] * 100)
    with served() as server:
        server.pages["/metrics"] = ok(engine.text)
        sources = [{"url": f"{server.url}/metrics", "server": "chat"}]
        with sidecar(database, tmp_path, sources) as client:
            until(client, lambda status: condition(status) == "idle")
    with sidecar(database, tmp_path, sources) as client:
        (before,) = until(client, lambda status: condition(status) == "unreachable")["sources"]
    with sidecar(database, tmp_path, sources) as client:
        (after,) = until(
            client,
            lambda status: (
                condition(status) == "unreachable"
                and status["sources"][0]["scraped_at"] > before["scraped_at"]
            ),
        )["sources"]
        labels = '{kind="vllm",source="chat"}'
        assert shows(client, f"driftguard_source_up{labels} 0.0")
        (answered,) = re.findall(
            rf"^driftguard_source_last_success_timestamp_seconds{labels} (.+)$",
            client.get("/metrics").text,
            re.MULTILINE,
        )
    assert datetime.fromtimestamp(float(answered), UTC) == datetime.fromisoformat(before["answered_at"])
    assert [before[name] for name in ("kind", "fidelity")] == ["vllm", "counter"]
    for name in ("kind", "fidelity", "since", "answered_at"):
        assert after[name] == before[name]


def test_a_server_that_no_sidecar_scrapes_any_more_is_not_called_reporting(
    database: Database, tmp_path: Path, server: Served
) -> None:
    """Its row is shown for a day, also where it was taken out of the settings."""
    engine = FakeVllm(running=0)
    engine.serve([2] * 100)
    server.pages["/metrics"] = ok(engine.text)
    kept = {"url": f"{server.url}/metrics", "server": "kept"}
    with sidecar(database, tmp_path, [kept, {**kept, "server": "removed"}]) as client:
        until(client, lambda status: [one["condition"] for one in status["sources"]] == ["idle", "idle"])
    with database.session() as session:
        long_ago = datetime.now(UTC) - timedelta(minutes=6)
        session.execute(update(Source).values(scraped_at=long_ago, answered_at=long_ago))
    with sidecar(database, tmp_path, [kept]) as client:
        found = until(client, lambda status: status["sources"][0]["condition"] == "idle")["sources"][1]
        assert (found["server"], found["condition"]) == ("removed", "stale")
        assert found["detail"] == "no sidecar reads it any more: it is in the settings of none that runs"
        assert datetime.fromisoformat(found["since"]) == long_ago
        assert found["detail"] in client.get("/").text


def test_a_server_that_a_sidecar_with_another_clock_scrapes_is_not_called_unread(
    database: Database, tmp_path: Path, server: Served
) -> None:
    """Its scrapes are dated by that clock: one that is ahead would call it in the settings of none."""
    engine = FakeVllm(running=0)
    engine.serve([2] * 100)
    server.pages["/metrics"] = ok(engine.text)
    ahead = datetime.now(UTC) + timedelta(minutes=10)
    with sidecar(database, tmp_path, [{"url": f"{server.url}/metrics", "server": "idle"}]) as client:
        until(client, lambda status: condition(status) == "idle")
        with database.session() as session:
            (read,) = source_models(session, stored.all_sources(session), ahead)
        assert (read.condition, "no sidecar" in read.detail) == ("idle", False)
    with database.session() as session:
        (left,) = source_models(session, stored.all_sources(session), ahead)
    assert (left.condition, "no sidecar" in left.detail) == ("stale", True)


def test_two_sidecars_with_the_same_source_count_it_once_and_the_second_takes_over(
    database: Database, tmp_path: Path, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape_loop, "LOOK_SECONDS", 0.1)
    engine = FakeVllm()

    def text() -> str:
        engine.serve([4, 0, 3, 1])
        return engine.text()

    server.pages["/metrics"] = ok(text)
    sources = [{"url": server.url, "server": "chat"}]
    with ExitStack() as stack:
        first = stack.enter_context(sidecar(database, tmp_path, sources))
        until(first, lambda status: bool(status["streams"]))
        with sidecar(database, tmp_path, sources) as second:
            status = until(
                second,
                lambda status: (
                    status["sources_elsewhere"] == ["chat"]
                    and bool(status["sources"])
                    and stored_steps(database) >= 8
                ),
            )
            assert status["sources"][0]["scraped_by"] in second.get("/").text
            assert second.get("/readyz").json()["status"] == "ready"
            assert shows(first, 'driftguard_scraping_active{source="chat"} 1.0')
            wait_until(
                lambda: shows(second, 'driftguard_scraping_active{source="chat"} 0.0'), "the second's metrics"
            )
            assert "driftguard_source_up{" not in second.get("/metrics").text

            stack.close()
            by_first = stored_steps(database)
            until(second, lambda status: stored_steps(database) > by_first)
            up = 'driftguard_source_up{kind="vllm",source="chat"} 1.0'
            wait_until(lambda: shows(second, up), "the metrics of what is stored")
    assert stored_steps(database) <= engine.steps


def stored_steps(database: Database) -> int:
    with database.session() as session:
        return session.scalar(select(func.sum(Record.steps))) or 0


def test_a_sidecar_that_does_not_get_to_its_servers_is_not_ready(
    database: Database, tmp_path: Path, server: Served
) -> None:
    settings = Settings.model_validate(
        {"data_dir": tmp_path, "sources": [{"url": server.url, "server": "chat"}]}
    )
    scraping = Sidecar(settings, database, "http://sidecar").scraping
    assert scraping.overdue(datetime.now(UTC)) == []
    assert scraping.overdue(datetime.now(UTC) + timedelta(minutes=2)) == ["chat"]
