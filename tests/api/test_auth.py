"""Who may do what: anybody on a loopback address, only holders of a key on any other."""

from __future__ import annotations

import json

import pytest

from driftguard.api.auth import refuse_open_bind
from driftguard.errors import BadSettings
from driftguard.settings import Settings
from driftguard.store.database import Database
from driftguard.store.keys import create_key, revoke_key
from driftguard_http import is_loopback
from tests.api.ingest_server import serving
from tests.benchmarks.ingest_app import ingest_app

CALLS = [
    ("POST", "/api/v1/records"),
    ("POST", "/api/v1/unrecorded"),
    ("POST", "/api/v1/captures"),
    ("GET", "/api/v1/captures"),
]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST")],
        *[
            (host, False)
            for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example.com", "")
        ],
    ],
)
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_starting_open_without_a_key_is_refused_with_the_reason() -> None:
    refuse_open_bind("127.0.0.1", has_keys=False)
    refuse_open_bind("0.0.0.0", has_keys=True)
    with pytest.raises(BadSettings, match=r"0\.0\.0\.0 .*`driftguard keys create NAME`"):
        refuse_open_bind("0.0.0.0", has_keys=False)


def test_on_another_address_a_key_is_needed(database: Database) -> None:
    with database.session() as session:
        key, other = create_key(session, "engine"), create_key(session, "old")
        revoke_key(session, "old")
    settings = Settings(host="0.0.0.0")  # what the sidecar binds; this test reaches it over loopback
    with serving(ingest_app(settings, database.libpq_url)) as client:
        for method, path in CALLS:
            for authorization in (
                "",
                f"Bearer {other}",
                "Bearer nonsense",
                f"Basic {key}",
                "Basic caf\xe9",
                "Bearer",
            ):
                headers = [(b"Authorization", authorization.encode("latin-1"))] if authorization else []
                answer = client.request(method, path, content=b"[]", headers=headers)
                assert answer.status_code == 401, (path, authorization)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert answer.headers["content-type"] == "application/problem+json"
        allowed = client.post("/api/v1/records", content=b"[]", headers={"Authorization": f"Bearer {key}"})
    assert json.loads(allowed.content) == {"accepted": 0, "duplicates": 0}
