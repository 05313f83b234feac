"""What a sidecar refuses before it routes: foreign sites, missing keys, bodies too large or too slow."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from driftguard.api.auth import CHECKS_AT_ONCE
from driftguard.app import Sidecar, create_app
from driftguard.records import encode_record
from driftguard.settings import Settings
from driftguard.store.database import Database
from driftguard.store.keys import create_key, revoke_key
from driftguard_http import guard
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident
from tests.api.ingest_server import serving
from tests.chaos.hostile import taken_foreign_writes
from tests.store.samples import make_records

pytestmark = pytest.mark.slow

TWO_GIGABYTES = 2_000_000_000


@contextmanager
def sidecar(database: Database, data_dir: Path, **settings: Any) -> Iterator[httpx.Client]:
    """`host` is what it takes itself to be bound to; it is served on loopback."""
    chosen = Settings.model_validate({"data_dir": data_dir, **settings})
    with serving(create_app(Sidecar(chosen, database, "http://sidecar"))) as client:
        yield client


def raw(client: httpx.Client, request: bytes, *, timeout_seconds: float = 30.0) -> bytes:
    """The first bytes of the answer to what is sent as it is."""
    address = urlsplit(str(client.base_url))
    with socket.create_connection((address.hostname, address.port), timeout_seconds) as connection:
        connection.sendall(request)
        return connection.recv(65_536)


def test_no_write_is_taken_from_a_page_of_another_site(database: Database, tmp_path: Path) -> None:
    with sidecar(database, tmp_path) as client:
        document = client.get("/api/v1/openapi.json").json()
        assert list(taken_foreign_writes(str(client.base_url), document)) == []
        problem = client.post("/api/v1/records", content=b"[]", headers={"Origin": "http://evil.example"})
        assert problem.headers["content-type"] == "application/problem+json"
        assert "http://evil.example" in problem.json()["detail"]


def test_a_name_that_resolves_to_loopback_reads_nothing(database: Database, tmp_path: Path) -> None:
    with sidecar(database, tmp_path, alerting={"external_url": "https://dg.example.com"}) as client:
        for path in ("/", "/api/v1/captures", "/api/v1/status", "/metrics", "/healthz"):
            assert client.get(path, headers={"Host": "evil.example"}).status_code == 403
            expected = 401 if path == "/api/v1/captures" else 200  # others come by this name
            assert client.get(path, headers={"Host": "dg.example.com"}).status_code == expected


@pytest.mark.parametrize(
    "header",
    [
        {"Host": "dg.example.com"},
        {"X-Forwarded-For": "203.0.113.7"},
        {"X-Forwarded-Proto": "https"},
        {"X-Real-IP": "203.0.113.7"},
        {"Forwarded": "for=203.0.113.7"},
        {"Via": "1.1 front"},
    ],
)
def test_on_loopback_whoever_comes_through_a_reverse_proxy_needs_a_key(
    database: Database, tmp_path: Path, header: dict[str, str]
) -> None:
    """For the sidecar each of its requests comes from this machine."""
    with database.session() as session:
        key = create_key(session, "operator")
    incident = add_incident(database, [])
    with sidecar(database, tmp_path, alerting={"external_url": "https://dg.example.com"}) as client:
        for forwarded, expected in (({}, 200), (header, 401)):
            assert client.post("/api/v1/records", content=b"[]", headers=forwarded).status_code == expected
            assert client.get("/api/v1/captures", headers=forwarded).status_code == expected
            page = client.get(f"/incidents/{incident}", headers=forwarded)
            assert page.status_code == 200
            assert ('id="key"' in page.text) == (forwarded == header)
        by_key = {**header, "Authorization": f"Bearer {key}"}
        assert client.post("/api/v1/records", content=b"[]", headers=by_key).status_code == 200


def test_the_key_is_asked_for_before_the_body(database: Database, tmp_path: Path) -> None:
    with sidecar(database, tmp_path, host="0.0.0.0") as client:
        for path in ("/api/v1/records", "/v1/traces", "/api/v1/retrain", "/api/v1/no-such-thing"):
            for length in (f"Content-Length: {TWO_GIGABYTES}", "Transfer-Encoding: chunked"):
                head = f"POST {path} HTTP/1.1\r\nHost: a\r\n{length}\r\n\r\n"
                assert raw(client, head.encode()).startswith(b"HTTP/1.1 401 "), (path, length)


@pytest.mark.parametrize("path", ["/api/v1/records", "/v1/metrics", "/api/v1/retrain"])
def test_a_body_is_refused_as_soon_as_it_is_too_large(database: Database, tmp_path: Path, path: str) -> None:
    with sidecar(database, tmp_path) as client:
        declared = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {TWO_GIGABYTES}\r\n\r\n"
        answer = raw(client, declared.encode())
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer.lower()

        taken = 0

        def endless() -> Iterator[bytes]:
            nonlocal taken
            while taken < TWO_GIGABYTES:
                taken += 1_000_000
                yield b"a" * 1_000_000

        with suppress(httpx.WriteError, httpx.ReadError):  # cut off while it sent
            headers = {"Content-Type": "application/json"}
            assert client.post(path, content=endless(), headers=headers).status_code == 413
        assert taken < 100_000_000


def test_a_body_that_comes_too_slowly_is_not_waited_for(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    with sidecar(database, tmp_path) as client:
        head = b"POST /api/v1/records HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n[]"
        assert raw(client, head).startswith(b"HTTP/1.1 408 ")
        assert client.post("/api/v1/records", content=b"[]").status_code == 200


def test_a_refusal_is_read_by_whoever_sends_an_ordinary_batch(database: Database, tmp_path: Path) -> None:
    body = b"\n".join(map(encode_record, make_records(1_000, seed=3)))
    with sidecar(database, tmp_path, host="0.0.0.0") as client:
        for _ in range(20):
            assert client.post("/api/v1/records", content=body).status_code == 401


def test_a_revoked_key_is_refused_after_a_while_and_a_wrong_one_at_once(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftguard.api.auth.VALID_SECONDS", 0.2)
    with database.session() as session:
        key = create_key(session, "engine")
    with sidecar(database, tmp_path, host="0.0.0.0") as client:

        def status(given: str) -> int:
            headers = {"Authorization": f"Bearer {given}"}
            return client.post("/api/v1/records", content=b"[]", headers=headers).status_code

        assert status(key) == 200
        assert status(key[:-1]) == 401
        with database.session() as session:
            revoke_key(session, "engine")
        wait_until(lambda: status(key) == 401, "the revoked key to be refused")


def test_keys_that_the_database_does_not_tell_of_take_few_threads(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = threading.Event()

    def hang(*_: object) -> bool:
        hanging.wait(60)
        return False

    monkeypatch.setattr("driftguard.api.auth._is_stored", hang)
    monkeypatch.setattr("driftguard.api.auth.CHECK_SECONDS", 0.1)
    with sidecar(database, tmp_path, host="0.0.0.0") as client:
        before = threading.active_count()
        try:
            for number in range(80):
                headers = {"Authorization": f"Bearer unknown-{number}"}
                answer = client.post("/api/v1/records", content=b"[]", headers=headers)
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) > 0
            assert threading.active_count() <= before + CHECKS_AT_ONCE
            assert client.get("/readyz").status_code == 200
        finally:
            hanging.set()


def test_reads_ask_for_a_key_where_the_operator_says_so(database: Database, tmp_path: Path) -> None:
    with database.session() as session:
        key = create_key(session, "browser")
    with sidecar(database, tmp_path, host="0.0.0.0", http={"require_key_to_read": True}) as client:
        for path in ("/", "/metrics", "/api/v1/status", "/api/v1/records", "/static/page.css"):
            refused = client.get(path)
            assert refused.status_code == 401
            assert "Basic" in refused.headers["www-authenticate"]  # so that a browser asks its user
            assert client.get(path, auth=("anybody", key)).status_code in (200, 404)
            assert client.get(path, headers={"Authorization": f"Bearer {key}"}).status_code in (200, 404)
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 200


def test_exports_that_nobody_reads_leave_the_rest_working(database: Database, tmp_path: Path) -> None:
    wide = "\N{TURTLE}" * 256  # 1 kB: more than sockets take in is soon told
    with sidecar(database, tmp_path, http={"max_exports": 2}) as client:
        for seed in range(12):
            records = make_records(1_000, seed=seed, session=wide, draft=wide)
            body = b"\n".join(map(encode_record, records))
            assert client.post("/api/v1/records", content=body).status_code == 200
        address = urlsplit(str(client.base_url))
        head = b"GET /api/v1/records?format=jsonl HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        unread = [socket.create_connection((address.hostname, address.port)) for _ in range(10)]
        try:
            for connection in unread:
                connection.sendall(head)
            statuses = sorted(connection.recv(12)[9:12] for connection in unread)
            assert statuses == [b"200"] * 2 + [b"503"] * 8
            refused = client.get("/api/v1/records?format=csv")
            assert refused.status_code == 503
            assert "http.max_exports is 2" in refused.json()["detail"]
            assert int(refused.headers["retry-after"]) > 0
            assert client.get("/readyz").status_code == 200
        finally:
            for connection in unread:
                connection.close()
        wait_until(lambda: _is_exported(client), "the slots of the exports that were given up")


def _is_exported(client: httpx.Client) -> bool:
    with client.stream("GET", "/api/v1/records?format=jsonl") as answer:
        return answer.status_code == 200 and sum(1 for _ in answer.iter_lines()) == 12_000


def test_large_answers_are_compressed_for_whoever_asks(database: Database, tmp_path: Path) -> None:
    with sidecar(database, tmp_path) as client:
        with client.stream("GET", "/metrics", headers={"Accept-Encoding": "gzip"}) as answer:
            packed = b"".join(answer.iter_raw())
        assert answer.headers["content-encoding"] == "gzip"
        assert b"driftguard_database_up" in gzip.decompress(packed)
        assert len(packed) < len(gzip.decompress(packed)) / 3
        plain = client.get("/metrics", headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        small = client.get("/healthz", headers={"Accept-Encoding": "gzip"})
        assert "content-encoding" not in small.headers
        assert json.loads(small.content) == {"status": "ok"}


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("br", False),
        ("*;q=0", False),
    ],
)
def test_an_answer_is_compressed_only_for_whom_that_is_acceptable(
    database: Database, tmp_path: Path, accepted: str, is_packed: bool
) -> None:
    with sidecar(database, tmp_path) as client:
        answer = client.get("/metrics", headers={"Accept-Encoding": accepted})
    assert (answer.headers.get("content-encoding") == "gzip") == is_packed
    assert "accept-encoding" in answer.headers["vary"].lower()
    assert b"driftguard_database_up" in answer.content


@pytest.mark.parametrize("name", ["uPlot.js", "style.css"])
def test_a_file_that_a_browser_has_is_not_sent_again_compressed_or_not(
    database: Database, tmp_path: Path, name: str
) -> None:
    with sidecar(database, tmp_path) as client:
        tags = set()
        for accepted in ("gzip", "identity"):
            headers = {"Accept-Encoding": accepted}
            answer = client.get(f"/static/{name}", headers=headers)
            tag = answer.headers["etag"]
            tags.add(tag)
            for known in (tag, tag.removeprefix("W/"), f'"other", {tag}', "*"):
                again = client.get(f"/static/{name}", headers=headers | {"If-None-Match": known})
                assert (again.status_code, again.content) == (304, b"")
                assert again.headers["etag"] == tag
                assert again.headers["cache-control"] == answer.headers["cache-control"]
                assert "content-encoding" not in again.headers
            other = client.get(f"/static/{name}", headers=headers | {"If-None-Match": '"other"'})
            assert (other.status_code, other.content) == (200, answer.content)
    (tag,) = tags  # of either encoding, which only a weak one may be
    assert tag.startswith("W/")
