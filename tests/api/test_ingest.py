"""POST /api/v1/records over real HTTP and a real database: what is stored, and what a sender is told."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import Request
from sqlalchemy import text

from driftguard.api.problems import MalformedBody
from driftguard.api.request_body import Bodies
from driftguard.records import AcceptanceRecord, encode_record
from driftguard.settings import IngestSettings, Settings
from driftguard.store.database import Database
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import is_held_up, kill_held_up, serving, writers_held_up
from tests.benchmarks.ingest_app import ingest_app
from tests.store.samples import make_records

LIMITS = IngestSettings(max_batch_records=200, max_batch_bytes=170_000, max_queued_records=300)
PATH = "/api/v1/records"


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    with serving(ingest_app(Settings(ingest=LIMITS), database.libpq_url)) as client:
        yield client


@pytest.fixture(scope="module")
def refusing_client(module_database_url: str) -> Iterator[httpx.Client]:
    """One server for all the tests in which nothing may be stored; that is checked at the end."""
    with serving(ingest_app(Settings(ingest=LIMITS), module_database_url)) as client:
        yield client
    database = Database.open(module_database_url)
    assert stored(database) == 0
    database.close()


def lines(records: list[AcceptanceRecord]) -> bytes:
    return b"\n".join(encode_record(record) for record in records) + b"\n"


def changed(**fields: Any) -> bytes:
    """One good record with some fields replaced; a field set to ... is left out."""
    record = json.loads(encode_record(make_records(1, seed=77)[0])) | fields
    return json.dumps({name: value for name, value in record.items() if value is not ...}).encode()


def stored(database: Database) -> int:
    with database.session() as session:
        return session.scalar(text("SELECT count(*) FROM records")) or 0


def test_json_lines_an_array_and_gzip_are_all_understood(client: httpx.Client, database: Database) -> None:
    batches = [make_records(5, seed=seed) for seed in range(3)]
    array = b" [" + b",".join(encode_record(record) for record in batches[1]) + b"]"
    answers = [
        client.post(PATH, content=lines(batches[0]), headers={"Content-Type": "application/x-ndjson"}),
        client.post(PATH, content=array, headers={"Content-Type": "application/json"}),
        client.post(PATH, content=gzip.compress(lines(batches[2])), headers={"Content-Encoding": "gzip"}),
        client.post(PATH, content=lines(batches[0])),
    ]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [answer.json() for answer in answers] == [
        *[{"accepted": 5, "duplicates": 0}] * 3,
        {"accepted": 0, "duplicates": 5},
    ]
    assert stored(database) == 15


@pytest.mark.parametrize("k", [65, 1_024])
def test_a_record_may_tell_of_as_many_positions_as_the_largest_k(
    client: httpx.Client, database: Database, k: int
) -> None:
    counts = {"steps": 300, "drafted": 300 * k, "accepted": 3 * k, "emitted": 3 * k + 300}
    told = {"drafted_per_position": [300] * k, "accepted_per_position": [3] * k}
    line = changed(**counts, **told, num_speculative_tokens=k)
    assert client.post(PATH, content=line).json() == {"accepted": 1, "duplicates": 0}
    with database.session() as session:
        assert session.scalar(text("SELECT accepted_per_position FROM records")) == [3] * k
    longer = changed(**counts, accepted_per_position=[0] * 1_025)
    (error,) = client.post(PATH, content=longer).json()["errors"]
    assert (error["field"], error["detail"]) == ("accepted_per_position", "expected array of length <= 1024")


def test_an_empty_array_is_fine(refusing_client: httpx.Client) -> None:
    assert refusing_client.post(PATH, content=b"[]").json() == {"accepted": 0, "duplicates": 0}


def test_bad_lines_are_named_and_the_good_ones_stored(client: httpx.Client, database: Database) -> None:
    good = [encode_record(record) for record in make_records(2)]
    body = b"\n".join([good[0], changed(accepted=9_999), b"", b"{oops", changed(speed=1), good[1]])
    answer = client.post(PATH, content=body)
    problem = answer.json()
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert (problem["accepted"], problem["duplicates"], problem["errors_total"]) == (2, 0, 3)
    assert [(error["line"], error["field"]) for error in problem["errors"]] == [
        (2, "accepted"),
        (4, None),
        (5, "speed"),
    ]
    assert "3 of 5 records" in problem["detail"]
    assert stored(database) == 2


def test_names_that_no_index_can_hold_are_named_and_the_other_records_stored(
    client: httpx.Client, database: Database
) -> None:
    rng = np.random.default_rng(5)
    fields = ("server", "target", "draft_version", "method")
    long = {field: "".join(map(chr, rng.integers(0x4E00, 0x9FFF, 256))) for field in fields}
    known = {field: name[:216] for field, name in long.items()}  # 2,592 bytes, the most but a few
    good = [encode_record(record) for record in make_records(2)]
    problem = client.post(PATH, content=b"\n".join([good[0], changed(**long), good[1]])).json()
    assert (problem["accepted"], problem["errors_total"]) == (2, 1)
    (error,) = problem["errors"]
    assert (error["line"], error["field"]) == (2, "server")
    assert "3072 bytes" in error["detail"]
    assert client.post(PATH, content=changed(**known)).json() == {"accepted": 1, "duplicates": 0}
    assert stored(database) == 3


NOW = datetime.now(UTC)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"steps": ...}, "steps", "missing"),
        ({"unheard_of": 1}, "unheard_of", "unknown field"),
        ({"drafted": -1}, "drafted", ">= 0"),
        ({"drafted": "many"}, "drafted", "int"),
        ({"accepted": 10**6}, "accepted", "more than drafted"),
        ({"emitted": 10**6}, "emitted", "accepted + steps"),
        ({"started_at": (NOW + timedelta(hours=1)).isoformat()}, "ended_at", "before started_at"),
        ({"ended_at": (NOW + timedelta(hours=1)).isoformat()}, "ended_at", "in the future"),
        ({"started_at": "0001-01-01T00:00:00+14:00"}, "started_at", "days before ended_at"),
        ({"ended_at": "2026-01-01T00:00:00"}, "ended_at", "timezone"),
        ({"segment": "a\x00b"}, "segment", "NUL"),
        ({"record_id": "7"}, "record_id", "UUID"),
        ({"kind": "guess"}, "kind", "guess"),
        ({"steps": 2**70}, "steps", "<= 1099511627776"),
    ],
)
def test_each_bad_field_is_named(
    refusing_client: httpx.Client, fields: dict[str, Any], field: str, words: str
) -> None:
    answer = refusing_client.post(PATH, content=changed(**fields))
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert (error["line"], error["field"]) == (1, field)
    assert words in error["detail"]


def test_a_record_past_retention_is_refused_with_the_reason(refusing_client: httpx.Client) -> None:
    old = make_records(1, ended_at=NOW - timedelta(days=31))
    [error] = refusing_client.post(PATH, content=lines(old)).json()["errors"]
    assert error["field"] == "ended_at"
    assert "30 days" in error["detail"]


def test_at_most_a_hundred_errors_are_listed(refusing_client: httpx.Client) -> None:
    problem = refusing_client.post(PATH, content=b"\n".join([changed(drafted=-1)] * 150)).json()
    assert (len(problem["errors"]), problem["errors_total"]) == (100, 150)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"hello there", "not JSON"),
        (b"[{]", "array"),
        (b"[" * 100_000, "array"),
        (b'{"a":' * 15_000, "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (changed(segment="\ud800"), "surrogate"),
    ],
    ids=["nothing", "words", "broken", "deep-arrays", "deep-objects", "no-text", "half-a-character"],
)
def test_a_body_that_is_no_json(refusing_client: httpx.Client, body: bytes, words: str) -> None:
    answer = refusing_client.post(PATH, content=body)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


def test_too_many_records_are_refused_whole(client: httpx.Client, database: Database) -> None:
    answer = client.post(PATH, content=lines(make_records(201)))
    assert answer.status_code == 413
    assert answer.json()["max_records"] == 200
    assert stored(database) == 0
    assert client.post(PATH, content=lines(make_records(200))).status_code == 200


def chunks(total: int) -> Iterator[bytes]:
    for _ in range(total // 1_000):
        yield b" " * 1_000


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b" " * (LIMITS.max_batch_bytes + 1), {}),
        (chunks(200_000), {}),  # no Content-Length: counted while reading
        (gzip.compress(b" " * 50_000_000), {"Content-Encoding": "gzip"}),
    ],
)
def test_too_many_bytes(
    refusing_client: httpx.Client, content: bytes | Iterator[bytes], headers: dict[str, str]
) -> None:
    answer = refusing_client.post(PATH, content=content, headers=headers)
    assert answer.status_code == 413
    assert f"{LIMITS.max_batch_bytes} bytes" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("content", "encoding", "status", "words"),
    [
        (b"not gzip at all", "gzip", 400, "gzip"),
        (gzip.compress(b"[]", mtime=0)[:-4], "gzip", 400, "truncated"),
        (b"[]", "br", 415, "'br'"),
    ],
)
def test_content_encodings(
    refusing_client: httpx.Client, content: bytes, encoding: str, status: int, words: str
) -> None:
    answer = refusing_client.post(PATH, content=content, headers={"Content-Encoding": encoding})
    assert answer.status_code == status
    assert words in answer.json()["detail"]


def test_a_database_that_fails_acknowledges_nothing_and_tells_nothing(
    client: httpx.Client, database: Database
) -> None:
    batch = make_records(3)
    with database.session() as session:
        session.execute(text("ALTER TABLE records RENAME TO hidden"))
    # The server closes a connection after an unexpected error, so the next request must not reuse it.
    broken = client.post(PATH, content=lines(batch), headers={"Connection": "close"})
    assert broken.status_code == 500
    assert "hidden" not in broken.text
    with database.session() as session:
        session.execute(text("ALTER TABLE hidden RENAME TO records"))
    assert client.post(PATH, content=lines(batch)).json() == {"accepted": 3, "duplicates": 0}


def test_a_full_queue_is_429_and_a_lost_database_503(client: httpx.Client, database: Database) -> None:
    first, second = make_records(200, seed=1), make_records(200, seed=2)
    with ThreadPoolExecutor() as threads, writers_held_up(database):
        # The limit is 300 records: the first batch waits for the database, the second finds no room.
        waiting = threads.submit(client.post, PATH, content=lines(first))
        wait_until(lambda: is_held_up(database), "the transaction of the first")
        busy = client.post(PATH, content=lines(second))
        kill_held_up(database)
        lost = waiting.result()
    assert busy.status_code == 429
    assert int(busy.headers["retry-after"]) >= 1
    assert lost.status_code == 503
    assert stored(database) == 0
    assert client.post(PATH, content=lines(first)).json() == {"accepted": 200, "duplicates": 0}


def test_unknown_paths_and_methods_are_problems_too(refusing_client: httpx.Client) -> None:
    missing, wrong = refusing_client.get("/nothing"), refusing_client.delete(PATH)
    assert (missing.status_code, wrong.status_code) == (404, 405)
    for answer in (missing, wrong):
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == answer.status_code


def test_a_sender_that_gives_up_before_its_body_has_arrived_is_no_unexpected_error() -> None:
    """As each does that waited for a sidecar which was suspended."""
    arriving: list[dict[str, Any]] = [
        {"type": "http.request", "body": b'{"record_id"', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return arriving.pop(0)

    async def read() -> None:
        async with Bodies().read(Request({"type": "http", "headers": []}, receive), max_bytes=99, growth=1):
            raise AssertionError("half a body was read")

    with pytest.raises(MalformedBody, match="closed the connection before its body had arrived"):
        asyncio.run(read())
