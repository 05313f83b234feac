"""What captured requests say, in the API of the incident that they are examples of."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from driftguard.app import Sidecar, create_app
from driftguard.settings import HttpSettings, Settings
from driftguard.store import incidents
from driftguard.store.captures import CapturedRequest, insert_captures
from driftguard.store.database import Database
from driftguard.store.keys import create_key
from tests.alerting.incident_rows import add_incident
from tests.api.ingest_server import serving
from tests.retraining.world import MOVED

EXAMPLE = UUID("00000000-0000-0000-0000-000000000001")


@pytest.fixture
def incident_id(database: Database) -> UUID:
    found = add_incident(database, [])
    captured = CapturedRequest(
        record_id=EXAMPLE,
        server="chat",
        target="target",
        draft_version="v1",
        captured_at=datetime.now(UTC),
        prompt_token_ids=[7, 8],
        output_token_ids=[9],
    )
    with database.session() as session:
        insert_captures(session, [captured], max_per_segment=10)
        incidents.find(session, found)[0].diagnosis = replace(MOVED, examples=(str(EXAMPLE),))
    return found


def shown(client: httpx.Client, incident_id: UUID, key: str | None = None, move: str | None = None) -> object:
    """By the incident itself, or by the answer to a move of it."""
    path, method, body = (f"/{move}", "POST", {"reason": "seen"}) if move else ("", "GET", None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = client.request(method, f"/api/v1/incidents/{incident_id}{path}", headers=headers, json=body)
    if answer.status_code != 200:
        return answer.status_code
    (example,) = answer.json()["diagnosis"]["examples"]
    assert example["record_id"] == str(EXAMPLE)
    return example["prompt_token_ids"]


@pytest.mark.parametrize(
    ("settings", "without_key"),
    [
        ({"host": "127.0.0.1"}, [7, 8]),
        ({"host": "0.0.0.0"}, None),
        ({"host": "0.0.0.0", "http": HttpSettings(require_key_to_read=True)}, 401),
    ],
    ids=str,
)
def test_they_are_shown_to_whoever_may_read_captured_text(
    database: Database, tmp_path: Path, incident_id: UUID, settings: dict[str, Any], without_key: object
) -> None:
    with database.session() as session:
        key = create_key(session, "reader")
    sidecar = Sidecar(Settings(data_dir=tmp_path, **settings), database, "http://sidecar")
    with serving(create_app(sidecar)) as client:
        assert shown(client, incident_id) == without_key
        for move in (None, "acknowledge", "accept"):
            assert shown(client, incident_id, key, move) == [7, 8]
        if settings["host"] != "127.0.0.1":
            assert shown(client, incident_id, "dg_nonsense") == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_login_that_is_for_another_shows_what_no_login_shows(
    database: Database, tmp_path: Path, incident_id: UUID, host: str
) -> None:
    """A proxy in front of the sidecar may have asked for it, and passes it on."""
    with database.session() as session:
        key = create_key(session, "reader")
    sidecar = Sidecar(Settings(data_dir=tmp_path, host=host), database, "http://sidecar")
    with serving(create_app(sidecar)) as client:
        for path in ("", f"incidents/{incident_id}", "api/v1/incidents"):
            assert client.get(f"/{path}", auth=("operator", "of the proxy")).status_code == 200, path
        for password, ids in (("of the proxy", None), (key, [7, 8])):
            answer = client.get(f"/api/v1/incidents/{incident_id}", auth=("operator", password))
            (example,) = answer.raise_for_status().json()["diagnosis"]["examples"]
            assert example["prompt_token_ids"] == (ids if host == "0.0.0.0" else [7, 8])


def test_a_reason_with_a_nul_is_refused_by_name(
    database: Database, tmp_path: Path, incident_id: UUID
) -> None:
    with serving(create_app(Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar"))) as client:
        answer = client.post(f"/api/v1/incidents/{incident_id}/acknowledge", json={"reason": "a\0b"})
    assert answer.status_code == 422
    assert "holds a NUL character" in answer.text
