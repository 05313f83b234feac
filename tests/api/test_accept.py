"""Accepting the new level of an incident over HTTP and from the command line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from driftguard.app import Sidecar, create_app
from driftguard.settings import Settings
from driftguard.store.database import Database
from driftguard.store.keys import create_key
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident
from tests.api.ingest_server import serving
from tests.cli.test_main import driftguard
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic

GOOD = {"code": 0.75, "german": 0.7}
BAD = {**GOOD, "german": 0.35}


def folded(client: httpx.Client) -> None:
    wait_until(lambda: client.get("/api/v1/status").json()["unfolded_records"] == 0, "the fold")


def verdicts(client: httpx.Client) -> tuple[str, dict[str, Any]]:
    (stream,) = client.get("/api/v1/status").json()["streams"]
    return stream["verdict"], {item["segment"]: item for item in stream["segments"]}


def test_accepted_before_a_restart_the_new_level_is_steady_after_it(
    database: Database, tmp_path: Path
) -> None:
    traffic = Traffic(seed=41, start=datetime.now(UTC) - timedelta(seconds=1940))
    with running_sidecar(database, tmp_path) as client:
        post(client, traffic.draw(1000, GOOD) + traffic.draw(300, BAD))
        folded(client)
        (incident,) = client.get("/api/v1/incidents").json()["incidents"]
        assert incident["level_accepted"] is False
        result = driftguard(
            "accept", incident["id"], "--reason", "a new tenant", "--sidecar", str(client.base_url)
        )
        assert result.returncode == 0, result.stderr
        assert "the baseline of german will be learned anew with the next record" in result.stdout
        answer = client.get(f"/api/v1/incidents/{incident['id']}").json()
    assert (answer["state"], answer["level_accepted"]) == ("resolved", True)
    assert (
        answer["transitions"][-1]["reason"] == "the operator accepted the new level as normal: a new tenant"
    )
    with running_sidecar(database, tmp_path) as client:
        post(client, traffic.draw(40, BAD))
        folded(client)
        _, segments = verdicts(client)
        assert segments["german"]["verdict"] == "insufficient_data"
        assert segments["german"]["learning"].endswith("an operator accepted a new normal")
        post(client, traffic.draw(600, BAD))
        folded(client)
        verdict, segments = verdicts(client)
    assert (verdict, segments["german"]["verdict"]) == ("steady", "steady")
    assert segments["german"]["baseline"]["rate"] == pytest.approx(0.35, abs=0.03)


def test_what_cannot_be_accepted_is_refused_by_name(database: Database, tmp_path: Path) -> None:
    incident_id, unknown = add_incident(database, []), uuid4()
    with running_sidecar(database, tmp_path) as client:
        url = f"/api/v1/incidents/{incident_id}/accept"
        for body in ({}, {"reason": " "}, {"reason": "x", "by": "me"}):
            answer = client.post(url, json=body)
            assert answer.status_code == 422
            assert ("by" if "by" in body else "reason") in answer.json()["detail"]
        assert client.post(url, json={"reason": "fine"}).json()["state"] == "resolved"
        again = client.post(url, json={"reason": "fine"})
        nobody = client.post(f"/api/v1/incidents/{unknown}/accept", json={"reason": "fine"})
        told = driftguard("accept", str(unknown), "--reason", "fine", "--sidecar", str(client.base_url))
    assert (again.status_code, again.headers["content-type"]) == (409, "application/problem+json")
    assert again.json()["detail"] == "the incident is already resolved; nothing was changed"
    assert (nobody.status_code, nobody.json()["detail"]) == (404, f"there is no incident {unknown}")
    assert told.returncode == 1
    assert f"there is no incident {unknown}" in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1


def test_an_incident_that_the_detector_did_not_open_has_nothing_to_learn_anew(
    database: Database, tmp_path: Path
) -> None:
    incident_id = add_incident(database, [], by_detector=False)
    with running_sidecar(database, tmp_path) as client:
        answer = client.post(f"/api/v1/incidents/{incident_id}/accept", json={"reason": "fine"})
        assert answer.status_code == 409
        assert "was not opened by the detector" in answer.json()["detail"]
        page = client.get(f"/incidents/{incident_id}").text
        assert f"{incident_id}/accept" not in page
        assert f"{incident_id}/resolve" in page
        assert client.get(f"/api/v1/incidents/{incident_id}").json()["state"] == "open"


def test_on_another_address_a_key_is_needed(database: Database, tmp_path: Path) -> None:
    incident_id = add_incident(database, [])
    with database.session() as session:
        key = create_key(session, "operator")
    settings = Settings(host="0.0.0.0", data_dir=tmp_path)  # reached over loopback by this test
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        answer = client.post(f"/api/v1/incidents/{incident_id}/accept", json={"reason": "fine"})
        assert answer.status_code == 401
        command = ("accept", str(incident_id), "--reason", "fine", "--sidecar", str(client.base_url))
        assert driftguard(*command).returncode == 1
        assert driftguard(*command, DRIFTGUARD_API_KEY=key).returncode == 0
