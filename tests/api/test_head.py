"""HEAD, which monitors and load balancers send: the headers of GET, and nothing after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftguard.store.database import Database
from tests.pipeline.sidecar import running_sidecar

PATHS = {
    "/": 200,
    "/healthz": 200,
    "/readyz": 200,
    "/metrics": 200,
    "/docs": 200,
    "/static/style.css": 200,
    "/alerts/rules.yaml": 200,
    "/api/v1/status": 200,
    "/api/v1/records?format=csv": 200,
    "/streams/999": 404,
    "/nothing": 404,
    "/v1/traces": 405,
}


def test_head_answers_as_get_does_without_the_body(database: Database, tmp_path: Path) -> None:
    with running_sidecar(database, tmp_path) as client:
        for path, status in PATHS.items():
            head, get = client.head(path), client.get(path)
            assert (head.status_code, get.status_code) == (status, status), path
            assert head.content == b"", path
            assert head.headers["content-type"] == get.headers["content-type"], path


@pytest.mark.parametrize("path", ["/healthz", "/docs"])
def test_head_tells_the_length_that_get_has(database: Database, tmp_path: Path, path: str) -> None:
    with running_sidecar(database, tmp_path) as client:
        plain = {"Accept-Encoding": "identity"}
        get = client.get(path, headers=plain)
        assert client.head(path, headers=plain).headers["content-length"] == str(len(get.content))
