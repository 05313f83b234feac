"""From records over HTTP to a page: a drop in one segment, the incident, its webhook, and the recovery."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from driftguard.store.database import Database
from tests.alerting.http_receiver import http_receiver, wait_until
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic

GOOD = {"code": 0.75, "english": 0.7, "german": 0.7}
BAD = {**GOOD, "german": 0.35}


def test_a_drop_pages_once_and_its_recovery_resolves_once_over_a_restart(
    database: Database, tmp_path: Path
) -> None:
    start = datetime.now(UTC) - timedelta(minutes=5)
    traffic = Traffic(seed=20, start=start, seconds_apart=0.09)
    with http_receiver() as pager:
        with running_sidecar(database, tmp_path, [pager.url]) as client:
            post(client, traffic.draw(1500, GOOD))
            changed_at = traffic.clock
            post(client, traffic.draw(300, BAD))
            wait_until(lambda: bool(pager.taken()), "the page")
            (incident,) = client.get("/api/v1/incidents").json()["incidents"]
            (stream,) = client.get("/api/v1/status").json()["streams"]
        with running_sidecar(database, tmp_path, [pager.url]) as client:
            post(client, traffic.draw(1200, GOOD))
            wait_until(lambda: len(pager.taken()) == 2, "the resolution")
            (after,) = client.get("/api/v1/incidents").json()["incidents"]
            post(client, traffic.draw(100, GOOD))

    assert incident["state"] == "open"
    assert [segment["segment"] for segment in incident["segments"]] == ["german"]
    assert abs((datetime.fromisoformat(incident["since"]) - changed_at).total_seconds()) < 60
    assert stream["verdict"] == "degraded"
    assert stream["incident_id"] == incident["id"]
    assert "german" in stream["text"]
    assert (after["id"], after["state"]) == (incident["id"], "resolved")
    firing, resolved = pager.received
    assert (firing.body["event"], resolved.body["event"]) == ("firing", "resolved")
    assert firing.body["incident"]["id"] == resolved.body["incident"]["id"] == incident["id"]
    assert firing.body["url"] == f"http://sidecar/incidents/{incident['id']}"
