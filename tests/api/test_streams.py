"""The streams of a large fleet in pages: searched, filtered, sorted; in the API and on the page."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, select, update

from driftguard.api import status as api_status
from driftguard.api import streams as api_streams
from driftguard.api.pages import routes
from driftguard.app import Sidecar, create_app
from driftguard.settings import Settings
from driftguard.status.verdict import Standing, standings
from driftguard.store.database import Database
from driftguard.store.tables import Segment, Stream
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident
from tests.api.ingest_server import serving
from tests.many_streams import populate

STREAMS = 240
PATHS = ["/", "/api/v1/status", "/api/v1/streams"]


@pytest.fixture(scope="module")
def fleet(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Server 8 is degraded, server 10 has a segment of its own, server 12 runs without speculation. Nothing
    arrives: the sidecar is not started."""
    database = Database.open(module_database_url)
    populate(database, STREAMS, minutes_apart=10)
    with database.session() as session:
        by_server = {row.server: row.id for row in session.scalars(select(Stream))}
        session.add(
            Segment(
                stream_id=by_server["server-10"],
                segment="Support_DE",
                first_seen_at=session.scalars(select(Stream.first_seen_at)).first(),
            )
        )
        session.execute(update(Stream).where(Stream.server == "server-12").values(method="none"))
    add_incident(database, (), stream_id=by_server["server-8"])
    clusters = {"eu": ["server-8", "server-1?"], "us": ["server-1*"]}
    settings = Settings(data_dir=tmp_path_factory.mktemp("data"), clusters=clusters)
    yield TestClient(create_app(Sidecar(settings, database, "http://sidecar")), "http://127.0.0.1")
    database.close()


def pages(fleet: TestClient, **query: Any) -> list[dict[str, Any]]:
    """The streams of all pages."""
    found: list[dict[str, Any]] = []
    while True:
        answer = fleet.get("/api/v1/streams", params=query)
        assert answer.status_code == 200, answer.text
        found += answer.json()["streams"]
        query["cursor"] = answer.json()["next_cursor"]
        if query["cursor"] is None:
            assert answer.json()["matching"] == len(found)
            return found


def told(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Without the speed, which is that of the five minutes before the answer."""
    return {item["id"]: {**item, "tokens_per_second": None} for item in found}


@pytest.mark.parametrize("order", ["verdict", "last_seen", "cost", "server"])
def test_the_pages_have_every_stream_once_as_the_status_has_it(fleet: TestClient, order: str) -> None:
    before = told(fleet.get("/api/v1/status").json()["streams"])
    found = pages(fleet, limit=70, sort=order)
    status = fleet.get("/api/v1/status").json()["streams"]
    assert len(found) == len(status) == STREAMS
    shown, after = told(found), told(status)
    assert shown.keys() == after.keys()
    # Recent figures are of whole minutes, and one may end meanwhile: each stream is as before it or after it.
    assert shown == {key: before[key] if shown[key] == before[key] else after[key] for key in shown}


def test_the_status_has_the_worst_streams_and_says_how_many_it_leaves_out(fleet: TestClient) -> None:
    whole = fleet.get("/api/v1/status").json()
    assert whole["streams_left_out"] == 0
    part = fleet.get("/api/v1/status", params={"limit": 2}).json()
    assert part["streams_left_out"] == STREAMS - 2
    assert told(part["streams"]) == told(whole["streams"][:2])
    assert [item["verdict"] for item in part["streams"]] == ["degraded", "stale"]
    for query in ("limit=0", "limit=501", "limit=2&limit=3", "count=2"):
        assert fleet.get(f"/api/v1/status?{query}").status_code == 422, query


def test_the_page_is_sorted_as_asked_on_each_of_its_pages(fleet: TestClient) -> None:
    def servers(page: str) -> list[str]:
        watched, _, _ = page.partition('data-live="unwatched"')
        return re.findall(r'id="stream-\d+">\s*<th[^>]*><a[^>]*><bdi>([^<]+)</bdi></a>', watched)

    page = fleet.get("/", params={"sort": "server"}).text
    assert "streams, by name</p>" in page
    found = servers(page)
    while more := re.search(r'<a href="([^"]+)" rel="next">', page):
        page = fleet.get("/" + unescape(more[1])).text
        found += servers(page)
    assert found == sorted(["chat", *(f"server-{n}" for n in range(1, STREAMS) if n != 12)])
    assert fleet.get("/", params={"sort": "colour"}).status_code == 422


def test_each_order_begins_with_what_its_name_says(fleet: TestClient) -> None:
    found = {
        order: pages(fleet, limit=500, sort=order) for order in ("verdict", "last_seen", "cost", "server")
    }
    assert found["verdict"][0]["server"] == found["cost"][0]["server"] == "server-8"
    verdicts = [item["verdict"] for item in found["verdict"]]
    assert list(dict.fromkeys(verdicts)) == ["degraded", "stale", "steady"]
    seen = [item["last_seen_at"] for item in found["last_seen"]]
    assert seen == sorted(seen, reverse=True)
    names = [item["server"] for item in found["server"]]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("query", "servers"),
    [
        ({"q": "SERVER-23"}, {"server-23", *(f"server-23{digit}" for digit in range(10))}),
        ({"q": "support_d"}, {"server-10"}),
        ({"q": "support%"}, set()),  # no pattern
        ({"server": "server-23"}, {"server-23"}),
        ({"method": "none"}, {"server-12"}),
        ({"verdict": "degraded"}, {"server-8"}),
        ({"verdict": "stale", "q": "server-1", "target": "target"}, None),
        ({"in_service": "false"}, set()),
        ({"target": "another"}, set()),
    ],
)
def test_the_streams_that_are_asked_for_are_listed(
    fleet: TestClient, query: dict[str, str], servers: set[str] | None
) -> None:
    found = pages(fleet, **query)
    if servers is None:
        every = pages(fleet, limit=500)
        servers = {
            item["server"] for item in every if item["verdict"] == "stale" and "server-1" in item["server"]
        }
        assert len(servers) > 50
    assert {item["server"] for item in found} == servers


def test_one_stream_is_what_the_list_says_of_it(fleet: TestClient) -> None:
    (listed,) = pages(fleet, server="server-8")
    answer = fleet.get(f"/api/v1/streams/{listed['id']}")
    assert told([answer.json()]) == told([listed])
    missing = fleet.get("/api/v1/streams/999999")
    assert (missing.status_code, missing.json()["detail"]) == (404, "there is no stream 999999")


def test_a_cursor_of_another_order_is_refused_by_name(fleet: TestClient) -> None:
    first = fleet.get("/api/v1/streams", params={"limit": 5, "sort": "server"}).json()
    answer = fleet.get("/api/v1/streams", params={"cursor": first["next_cursor"]})
    assert answer.status_code == 422
    assert "sorted by server, not by verdict" in answer.json()["detail"]
    assert fleet.get("/", params={"cursor": first["next_cursor"]}).status_code == 422
    assert fleet.get("/api/v1/streams", params={"sort": "name"}).status_code == 422


def test_the_page_shows_a_hundred_counts_all_and_leads_to_the_next(fleet: TestClient) -> None:
    shown: list[str] = []
    path: str | None = "/"
    while path is not None:
        page = fleet.get(path).text
        assert f"1 of {STREAMS - 1} streams degraded, 120 stale" in page
        watched, _, _ = page.partition('data-live="unwatched"')
        rows = re.findall(r'id="stream-(\d+)"', watched)
        assert 0 < len(rows) <= 100
        shown += rows
        found = re.search(r'href="([^"]*)" rel="next"', page)
        path = "/" + found[1].replace("&amp;", "&") if found else None
    assert len(shown) == len(set(shown)) == STREAMS - 1
    assert "1 stream without speculation" in page


def test_the_page_says_how_many_open_incidents_it_does_not_show(database: Database, tmp_path: Path) -> None:
    """As after an update of the engine on a large fleet: it showed the newest 50 as if these were all."""
    populate(database, 52, minutes_apart=1)
    with database.session() as session:
        found = list(session.scalars(select(Stream.id)))
    for stream_id in found[:50]:
        add_incident(database, (), stream_id=stream_id)
    page = TestClient(
        create_app(Sidecar(Settings(data_dir=tmp_path), database, "http://a")), "http://127.0.0.1"
    )
    assert "The newest 50 of" not in page.get("/").text
    for stream_id in found[50:]:
        add_incident(database, (), stream_id=stream_id)
    assert "The newest 50 of 52" in page.get("/").text


def test_records_without_speculation_are_not_told_as_none(database: Database, tmp_path: Path) -> None:
    populate(database, 2, minutes_apart=1)
    with database.session() as session:
        session.execute(update(Stream).values(method="none"))
    page = TestClient(
        create_app(Sidecar(Settings(data_dir=tmp_path), database, "http://a")), "http://127.0.0.1"
    )
    shown = page.get("/").text
    assert "No records yet" not in shown
    assert "No stream with speculation is in service" in shown
    assert "2 streams without speculation" in shown


def test_the_page_finds_what_is_searched(fleet: TestClient) -> None:
    page = fleet.get("/", params={"q": "Support", "verdict": "", "cursor": ""}).text
    assert Counter(re.findall(r">(server-\d+)</bdi></a>", page)) == {"server-10": 1}
    assert 'name="q" value="Support"' in page
    stale = fleet.get("/", params={"verdict": "stale"}).text
    assert set(re.findall(r'<tr class="(\w+)" id="stream', stale)) == {"stale"}
    nothing = fleet.get("/", params={"q": "<no such>"}).text
    assert "0 of them match" in nothing
    assert 'value="&lt;no such&gt;"' in nothing


def test_those_who_look_at_once_are_answered_one_after_the_other(fleet: TestClient) -> None:
    """Many that compute at once keep /healthz waiting, and ingest without connections to the database."""
    pool = fleet.app.state.context.database.engine.pool  # type: ignore[attr-defined]
    taken: list[int] = []

    def count(*_: object) -> None:
        taken.append(pool.checkedout())

    async def look() -> set[int]:
        transport = httpx.ASGITransport(fleet.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answers = await asyncio.gather(*(client.get(path) for path in 3 * PATHS))
            return {answer.status_code for answer in answers}

    event.listen(pool, "checkout", count)
    try:
        assert asyncio.run(look()) == {200}
    finally:
        event.remove(pool, "checkout", count)
    assert max(taken) == 1


@pytest.mark.parametrize("path", PATHS)
def test_those_who_have_gone_while_they_waited_are_not_answered_before_others(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Open pages ask again every few seconds: after an outage of the database all that they had given up was
    answered first, for minutes."""
    turn, asked = threading.Event(), [0]

    def slow(*arguments: Any, **named: Any) -> list[Standing]:
        asked[0] += 1
        assert turn.wait(30)
        return standings(*arguments, **named)

    for module in (api_status, api_streams, routes):
        monkeypatch.setattr(module, "standings", slow)
    app = create_app(Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar"))
    with serving(app) as client, ThreadPoolExecutor(1) as pool:
        place = (client.base_url.host, int(client.base_url.port or 0))
        gone = [socket.create_connection(place) for _ in range(20)]
        for one in gone:
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: {place[0]}\r\n\r\n".encode())
        wait_until(lambda: asked[0] == 1, "the first of them")
        for one in gone:
            one.close()
        assert client.get("/healthz").status_code == 200  # by now the sidecar has seen them go
        answer = pool.submit(client.get, path)
        turn.set()
        assert answer.result().status_code == 200
    assert asked[0] == 2


def test_the_fleet_is_grouped_by_the_clusters_of_the_settings(fleet: TestClient) -> None:
    page = fleet.get("/", params={"group": "cluster", "view": "wall"}).text
    groups = dict(re.findall(r'<h2 class="group"><bdi>(.+?)</bdi> <small>(\d+) streams?</small></h2>', page))
    told = Counter(
        item["cluster"] for item in pages(fleet, in_service=True, limit=500) if item["method"] != "none"
    )
    assert groups == {"eu": str(told["eu"]), "us": str(told["us"]), "in no cluster": str(told[None])}
    assert 10 <= told["eu"] <= 11 < told["us"] < told[None]
    (first,) = pages(fleet, server="server-8")
    assert first["cluster"] == "eu"


def test_a_fleet_without_clusters_is_not_offered_to_be_grouped_by_them(
    fleet: TestClient, database: Database, tmp_path: Path
) -> None:
    populate(database, 2, minutes_apart=10)
    client = TestClient(
        create_app(Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")), "http://127.0.0.1"
    )
    offered = '<option value="cluster"'
    assert offered in fleet.get("/").text
    page = client.get("/").text
    assert '<option value="target"' in page
    assert offered not in page
