"""The Python client against a real sidecar over real HTTP, also one that is away, full, or refuses."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest
from sqlalchemy import text
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from driftguard.app import Sidecar, create_app
from driftguard.client import AsyncClient, RefusedRecords, SidecarUnavailable, protocol
from driftguard.client.buffer import Buffer, Counts
from driftguard.errors import BadInput, NotFound, Unauthorized
from driftguard.records import AcceptanceRecord
from driftguard.settings import IngestSettings, Settings
from driftguard.store.database import Database
from driftguard.store.keys import create_key
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident, add_stream
from tests.api.ingest_server import serving
from tests.benchmarks.ingest_app import ingest_app
from tests.client.both import MakeClient, making
from tests.client.foreign_answers import FOREIGN_ANSWERS
from tests.pipeline.sidecar import running_sidecar
from tests.ports import unserved_port
from tests.store.samples import make_records
from tests.tls import tls_sidecar


@pytest.fixture(params=["sync", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with making(request.param) as make:
        yield make


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody answers there, and no other process can take it, until a sidecar does."""
    with unserved_port() as number:
        yield number


@pytest.fixture
def url(database: Database) -> Iterator[httpx.URL]:
    """Of a server that takes records, at most 50 of them at once."""
    settings = Settings(ingest=IngestSettings(max_batch_records=50))
    with serving(ingest_app(settings, database.libpq_url)) as client:
        yield client.base_url


def stored(database: Database) -> set[str]:
    with database.session() as session:
        return set(session.scalars(text("SELECT record_id::text FROM records")))


def ids(records: list[AcceptanceRecord]) -> set[str]:
    return {str(record.record_id) for record in records}


def test_what_is_sent_arrives_once_however_often_it_is_sent(
    make: MakeClient, url: httpx.URL, database: Database
) -> None:
    records = make_records(120)
    client = make(url, max_batch=25)
    for record in records + records[:10]:
        client.send(record)
    client.close(timeout_seconds=60)
    assert stored(database) == ids(records)
    assert (client.counts.sent, client.counts.waiting, client.counts.dropped) == (130, 0, 0)


def test_a_sidecar_is_trusted_by_the_authority_that_the_environment_names(
    make: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = make_records(1)
    with tls_sidecar(tmp_path) as sidecar:
        with pytest.raises(SidecarUnavailable, match="certificate verify failed"):
            make(sidecar.url).post(records)
        monkeypatch.setenv("SSL_CERT_FILE", str(sidecar.authority))
        make(sidecar.url).post(records)
    assert sidecar.paths == ["/api/v1/records"]


def test_an_authority_that_cannot_be_read_is_refused_by_name(
    make: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, content in ((tmp_path / "none.pem", None), (tmp_path / "no.pem", "no certificate")):
        if content is not None:
            file.write_text(content)
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        with pytest.raises(ValueError, match=f"^SSL_CERT_FILE: no certificates in {file}"):
            make("https://localhost:1")


def test_an_authority_that_cannot_be_read_does_not_matter_without_tls(
    make: MakeClient, url: httpx.URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    assert make(url).post(make_records(1)).accepted == 1


def test_a_batch_that_is_too_large_is_sent_in_parts(
    make: MakeClient, url: httpx.URL, database: Database
) -> None:
    records = make_records(120)
    client = make(url, max_batch=1_000, linger_seconds=60)
    for record in records:
        client.send(record)
    assert client.flush(timeout_seconds=60)
    assert stored(database) == ids(records)
    assert client.counts.sent == 120


def test_records_wait_while_the_sidecar_is_away(make: MakeClient, database: Database, port: int) -> None:
    records = make_records(30)
    client = make(f"http://127.0.0.1:{port}", max_batch=10)
    for record in records:
        client.send(record)
    assert not client.flush(timeout_seconds=0.3)
    wait_until(lambda: client.counts.failed_attempts > 0, "an attempt")
    assert client.counts.waiting == 30
    with serving(ingest_app(Settings(), database.libpq_url), port):
        assert client.flush(timeout_seconds=60)
    assert stored(database) == ids(records)
    assert (client.counts.sent, client.counts.dropped) == (30, 0)


def test_a_full_buffer_drops_the_oldest_and_counts_them(
    make: MakeClient, database: Database, port: int
) -> None:
    records = make_records(8)
    client = make(f"http://127.0.0.1:{port}", max_buffered=5, linger_seconds=60)
    for record in records:
        client.send(record)
    assert (client.counts.dropped, client.counts.waiting) == (3, 5)
    with serving(ingest_app(Settings(), database.libpq_url), port):
        assert client.flush(timeout_seconds=60)
    assert stored(database) == ids(records[3:])


def test_the_log_says_that_records_are_dropped_and_afterwards_how_many(
    make: MakeClient, database: Database, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """On the level that is shown by default, and once each however many they are."""
    records = make_records(40)
    client = make(f"http://127.0.0.1:{port}", max_buffered=5, linger_seconds=60)
    with caplog.at_level(logging.WARNING, "driftguard.client"):
        for record in records[:30]:
            client.send(record)
        said = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
        assert said == ["5 records wait: from now on the oldest are dropped"]
        with serving(ingest_app(Settings(), database.libpq_url), port):
            assert client.flush(timeout_seconds=60)
    assert "there is room again; 25 records were dropped meanwhile, and are lost" in caplog.messages


def test_a_full_buffer_stays_bounded_where_a_batch_was_put_back() -> None:
    buffer = Buffer(max_records=5, max_batch=4)
    for record in make_records(5):
        buffer.add(record)
    batch = buffer.take()
    for record in make_records(4):
        buffer.add(record)
    buffer.take_smaller_batches(batch)
    for record in make_records(3):
        buffer.add(record)
    assert (len(buffer._lines), buffer.counts.waiting, buffer.counts.dropped) == (5, 5, 7)


def test_a_refused_record_is_named_and_the_others_are_stored(
    make: MakeClient, url: httpx.URL, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    records = make_records(3)
    bad = msgspec.structs.replace(records[1], accepted=10**6)
    client = make(url)
    with caplog.at_level(logging.ERROR, "driftguard.client"):
        for record in (records[0], bad, records[2]):
            client.send(record)
        assert client.flush(timeout_seconds=60)
    assert (client.counts.sent, client.counts.refused) == (2, 1)
    assert "accepted: 1000000 is more than drafted" in caplog.text
    assert str(bad.record_id) in caplog.text
    assert stored(database) == ids([records[0], records[2]])


def test_post_waits_and_raises_what_was_refused(make: MakeClient, url: httpx.URL, database: Database) -> None:
    records = make_records(3)
    client = make(url)
    assert client.post(records[:2]) == client.post(make_records(2, seed=9))
    assert client.post(records[:2]).duplicates == 2
    with pytest.raises(RefusedRecords, match=r"1 of 2 records are refused.*accepted") as caught:
        client.post([records[2], msgspec.structs.replace(records[0], record_id=uuid4(), accepted=10**6)])
    [(place, why)] = caught.value.errors
    assert (place, why.field, caught.value.refused) == (1, "accepted", 1)
    assert str(records[2].record_id) in stored(database)


def test_what_cannot_be_written_as_json_does_not_reach_the_caller(make: MakeClient, url: httpx.URL) -> None:
    client = make(url)
    client.send(msgspec.structs.replace(make_records(1)[0], session=object()))
    assert client.counts.refused == 1


def test_the_sidecar_says_when_to_come_again(make: MakeClient) -> None:
    asked: list[float] = []

    async def answer(_: Request) -> Response:
        asked.append(time.monotonic())
        if len(asked) == 1:
            return JSONResponse({"detail": "full"}, 429, {"Retry-After": "1"})
        return JSONResponse({"accepted": 1, "duplicates": 0})

    with serving(Starlette(routes=[Route("/api/v1/records", answer, methods=["POST"])])) as served:
        client = make(served.base_url, linger_seconds=0)
        client.send(make_records(1)[0])
        assert client.flush(timeout_seconds=60)
    assert len(asked) == 2
    assert asked[1] - asked[0] >= 1
    assert client.counts.failed_attempts == 1


@pytest.mark.parametrize("path", ["/api/v1/records", "/api/v1/unrecorded"])
@pytest.mark.parametrize("foreign", FOREIGN_ANSWERS)
def test_something_else_at_the_address_is_no_sidecar_and_loses_nothing(
    make: MakeClient, foreign: str, path: str
) -> None:
    status, headers, content = FOREIGN_ANSWERS[foreign]
    answers = [Response(content, status, headers), JSONResponse({"accepted": 1, "duplicates": 0})]

    async def answer(_: Request) -> Response:
        return answers.pop(0)

    with serving(Starlette(routes=[Route(path, answer, methods=["POST"])])) as served:
        client = make(served.base_url, linger_seconds=0, report_seconds=0.01)
        if path.endswith("records"):
            client.send(make_records(1)[0])
        else:
            client.count_unrecorded("server-1", "stop_string")
        wait_until(lambda: not answers, "a second attempt")
        client.close()
        assert client.counts.sent == (path.endswith("records"))


def test_closing_without_a_sidecar_ends_in_time_and_counts_what_is_lost(make: MakeClient, port: int) -> None:
    client = make(f"http://127.0.0.1:{port}")
    for record in make_records(7):
        client.send(record)
    client.close(timeout_seconds=0.2)
    client.send(make_records(1)[0])
    assert (client.counts.dropped, client.counts.waiting) == (8, 0)


def test_status_and_incidents_are_read_by_their_types(
    make: MakeClient, database: Database, tmp_path: Path
) -> None:
    wanted = [add_incident(database, [], stream_id=add_stream(database, f"v{n}")) for n in range(3)]
    with running_sidecar(database, tmp_path) as sidecar:
        client = make(sidecar.base_url)
        status = client.status()
        assert [stream.server for stream in status.streams] == ["chat"] * 3
        assert status.generated_at.tzinfo is not None
        found = list(client.incidents(state="unresolved"))
        assert {incident.id for incident in found} == set(wanted)
        assert client.incident(wanted[0]).acceptance_before == 0.74
        (one,) = client.incidents(stream=found[0].stream.id)
        assert one.id == found[0].id
        with pytest.raises(NotFound, match="there is no incident"):
            client.incident(uuid4())
        with pytest.raises(BadInput, match="state"):
            list(client.incidents(state="closed"))


def test_every_page_of_incidents_is_read(
    make: MakeClient, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {add_incident(database, [], stream_id=add_stream(database, f"v{n}")) for n in range(3)}
    monkeypatch.setattr("driftguard.client.protocol.INCIDENTS_PER_PAGE", 2)
    with running_sidecar(database, tmp_path) as sidecar:
        assert {incident.id for incident in make(sidecar.base_url).incidents()} == wanted


def test_a_key_is_sent_and_its_lack_is_told(make: MakeClient, database: Database, tmp_path: Path) -> None:
    with database.session() as session:
        key = create_key(session, "serving")
    settings = Settings(host="0.0.0.0", data_dir=tmp_path)
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as served:
        assert make(served.base_url, api_key=key).post(make_records(1)).accepted == 1
        with pytest.raises(Unauthorized, match="needs an API key"):
            make(served.base_url).post(make_records(1))


def test_a_sidecar_that_stays_away_is_told_to_who_waits(
    make: MakeClient, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftguard.client.protocol.ATTEMPTS", 2)
    with pytest.raises(SidecarUnavailable, match="ConnectError"):
        make(f"http://127.0.0.1:{port}").status()


@pytest.mark.parametrize("key", ["hunter2\nX: y", "hunter 2", "hünter2"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(make: MakeClient, key: str) -> None:
    with pytest.raises(ValueError, match=r"^api_key: not a key") as refusal:
        make("http://127.0.0.1:1", api_key=key)
    assert key not in str(refusal.value)


def test_a_key_from_a_file_that_ends_its_line_is_the_key() -> None:
    assert protocol.headers("dg_key\n") == {"Authorization": "Bearer dg_key"}


@pytest.mark.parametrize(
    "address", ["sidecar:8200", "http://", "ftp://sidecar", "http://[::1", "http://u:hunter2@"]
)
def test_what_is_no_address_is_refused_at_once_and_no_password_is_shown(
    make: MakeClient, address: str
) -> None:
    with pytest.raises(ValueError, match=r"^url: ") as refusal:
        make(address)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("options", [{"max_buffered": 0}, {"max_batch": -1}])
def test_a_bad_option_is_named(make: MakeClient, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make("http://127.0.0.1:1", **options)


def unrecorded(database: Database) -> dict[tuple[str, str], int]:
    with database.session() as session:
        rows = session.execute(text("SELECT server, reason, requests FROM unrecorded_requests")).all()
    assert len({(server, reason) for server, reason, _ in rows}) == len(rows), "counted by two reporters"
    return {(server, reason): requests for server, reason, requests in rows}


def test_unrecorded_requests_are_told_now_and_then_and_at_the_end(
    make: MakeClient, url: httpx.URL, database: Database
) -> None:
    client = make(url, report_seconds=0.02)
    client.count_unrecorded("chat", "no_numbers")
    wait_until(lambda: unrecorded(database) == {("chat", "no_numbers"): 1}, "the first report")
    client.count_unrecorded("chat", "no_numbers", 4)
    client.count_unrecorded("code", "too_large")
    expected = {("chat", "no_numbers"): 5, ("code", "too_large"): 1}
    wait_until(lambda: unrecorded(database) == expected, "the second report")
    slow = make(url, report_seconds=3_600)
    slow.count_unrecorded("last", "encoded", 7)
    slow.close(timeout_seconds=60)
    assert unrecorded(database) == {**expected, ("last", "encoded"): 7}
    slow.count_unrecorded("last", "encoded", 7)  # after its end


def test_counts_of_unrecorded_requests_wait_while_the_sidecar_is_away(
    make: MakeClient, database: Database, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    client = make(f"http://127.0.0.1:{port}", report_seconds=0.02)
    client.count_unrecorded("chat", "no_numbers", 3)
    wait_until(lambda: "takes no counts of unrecorded requests" in caplog.text, "a failed report")
    client.count_unrecorded("chat", "no_numbers", 4)
    with serving(ingest_app(Settings(), database.libpq_url), port):
        wait_until(lambda: unrecorded(database) == {("chat", "no_numbers"): 7}, "the report")
    assert caplog.text.count("takes no counts of unrecorded requests") == 1


def test_a_report_whose_answer_was_lost_does_not_count_twice(
    make: MakeClient, url: httpx.URL, database: Database
) -> None:
    answers = []

    async def lossy(request: Request) -> Response:
        async with httpx.AsyncClient() as to_sidecar:
            answer = await to_sidecar.post(url.join(request.url.path), content=await request.body())
        answers.append(answer.json())
        return JSONResponse(answer.json(), 502 if len(answers) == 1 else answer.status_code)

    with serving(Starlette(routes=[Route("/api/v1/unrecorded", lossy, methods=["POST"])])) as served:
        client = make(served.base_url, report_seconds=0.02)
        client.count_unrecorded("chat", "no_numbers", 3)
        wait_until(lambda: len(answers) == 2, "two reports")
        client.close(timeout_seconds=60)
    assert answers == [{"accepted": 1, "duplicates": 0}, {"accepted": 0, "duplicates": 1}]
    assert unrecorded(database) == {("chat", "no_numbers"): 3}


def test_what_the_sidecar_refuses_of_a_report_is_named_and_not_sent_again(
    make: MakeClient, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(ingest=IngestSettings(max_streams=1))
    with serving(ingest_app(settings, database.libpq_url)) as served:
        client = make(served.base_url, report_seconds=0.02)
        client.count_unrecorded("a", "no_numbers")
        client.count_unrecorded("b", "no_numbers")
        wait_until(lambda: "more than ingest.max_streams (1)" in caplog.text, "the refusal")
        client.close(timeout_seconds=60)
    assert caplog.text.count("more than ingest.max_streams (1)") == 1
    assert unrecorded(database) == {("a", "no_numbers"): 1}


def test_a_bad_count_is_logged_by_name_and_others_are_sent(
    make: MakeClient, url: httpx.URL, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    client = make(url, report_seconds=3_600)
    bad: list[tuple[Any, Any, Any]] = [
        ("chat", "bored", 1),
        ("\ud800", "no_numbers", 1),
        ("chat", "no_numbers", 0),
        ("a\x00", "no_numbers", 1),
        (None, "no_numbers", 1),
    ]
    for server, reason, requests in bad:
        client.count_unrecorded(server, reason, requests)
    client.count_unrecorded("chat", "no_numbers")
    client.close(timeout_seconds=60)
    assert caplog.text.count("refused a count of unrecorded requests") == len(bad)
    assert all(f": {field}: " in caplog.text for field in ("reason", "requests", "server"))
    assert unrecorded(database) == {("chat", "no_numbers"): 1}


def test_records_are_sent_though_no_thread_could_be_started_to_look_the_name_up(
    url: httpx.URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a limit of processes: asyncio looks names up in threads."""
    start, refusals = threading.Thread.start, [1, 2]

    def refused_at_first(thread: threading.Thread) -> None:
        if thread.name.startswith("asyncio") and refusals:
            raise RuntimeError(f"can't start new thread: {refusals.pop()}")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused_at_first)

    async def scenario() -> Counts:
        client = AsyncClient(str(url.copy_with(host="localhost")), linger_seconds=0.0)
        client.send(make_records(1)[0])
        assert await client.flush(60)
        await client.close(60)
        return client.counts

    # Not on uvloop, which older releases of uvicorn make the loop of a process: it needs no Python threads.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        counts = runner.run(scenario())
    assert not refusals
    assert (counts.sent, counts.dropped) == (1, 0)


def test_what_is_counted_at_the_very_end_is_told(url: httpx.URL, database: Database) -> None:
    async def scenario() -> None:
        client = AsyncClient(str(url))
        client.count_unrecorded("chat", "no_numbers")
        await client.close(60)

    asyncio.run(scenario())
    assert unrecorded(database) == {("chat", "no_numbers"): 1}
