"""What the engine refuses before it routes: foreign sites, missing keys, bodies that are too large."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from driftguard_engine.server import app
from driftguard_engine.server.app import ServeOptions
from driftguard_engine.server.auth import hash_of

from driftguard_http import guard
from tests.engine.server.fake_engine import FakeEngine
from tests.engine.server.serving import served, wait_until

WRITES = ["/admin/drafts/v1/activate", "/admin/drafts", "/admin/speculation", "/v1/completions"]
FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Host": "evil.example"},
]


@pytest.mark.parametrize("path", [*WRITES, "/v1/chat/completions"])
def test_a_page_of_another_site_activates_no_draft_and_asks_for_no_text(
    client: httpx.Client, path: str
) -> None:
    for headers in FOREIGN:
        assert client.post(path, json={}, headers=headers).status_code == 403, headers


def test_a_name_that_resolves_to_loopback_reads_nothing(fake: FakeEngine) -> None:
    options = ServeOptions(shutdown_limit_seconds=5, allowed_hosts=("llm.internal",))
    with served(fake, options=options) as client:
        assert client.get("/admin/info", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/admin/info", headers={"Host": "llm.internal:80"}).status_code == 200


def test_refusals_have_the_form_that_each_client_expects(client: httpx.Client) -> None:
    foreign = {"Origin": "http://evil.example"}
    openai_form = client.post("/v1/completions", json={}, headers=foreign).json()["error"]
    assert openai_form["type"] == "permission_error"
    assert "http://evil.example" in openai_form["message"]
    problem = client.post("/admin/drafts", json={}, headers=foreign)
    assert problem.headers["content-type"] == "application/problem+json"


def test_the_key_is_asked_for_before_the_body(fake: FakeEngine) -> None:
    options = ServeOptions(admin_key_hash=hash_of("secret"), shutdown_limit_seconds=5)
    with served(fake, options=options) as client:
        head = b"POST /admin/drafts HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000000\r\n\r\n"
        assert _answered(client, head).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(("path", "too_many"), [("/v1/completions", 16_000_001), ("/admin/drafts", 64_001)])
def test_a_body_that_is_declared_too_large_is_not_read(
    client: httpx.Client, path: str, too_many: int
) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {too_many}\r\n\r\n"
    assert _answered(client, head.encode()).startswith(b"HTTP/1.1 413 ")


def test_large_bodies_share_a_room_and_small_ones_need_none(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "LARGE_BODIES_BYTES", 200_000)
    large, small = {"prompt": "a" * 200_000}, {"prompt": "a", "max_tokens": 1}
    with served(fake) as client:

        def refused() -> bool:
            answer = client.post("/v1/completions", json=large)
            told = (answer.headers.get("retry-after"), answer.json()["error"]["code"])
            return answer.status_code == 429 and told == ("2", "no_room")

        with _half_a_body(client, 200_000):
            wait_until(refused, "there was no room beside half a body")
            assert client.post("/v1/completions", json=small).status_code == 200
        wait_until(lambda: not refused(), "the room came back")


def test_a_large_body_that_stalls_is_not_waited_for(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    with _half_a_body(client, 1_000_000) as connection:
        assert connection.recv(65_536).startswith(b"HTTP/1.1 408 ")


@contextmanager
def _half_a_body(client: httpx.Client, size: int) -> Iterator[socket.socket]:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2 * size}\r\n\r\n"
    with socket.create_connection(
        (client.base_url.host, client.base_url.port or 0), timeout=30
    ) as connection:
        connection.sendall(head.encode() + b"a" * size)
        yield connection


def _answered(client: httpx.Client, request: bytes) -> bytes:
    address = (client.base_url.host, client.base_url.port or 0)
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(request)
        return connection.recv(65_536)
