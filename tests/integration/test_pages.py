"""From records over HTTP to a pager, through the real servers with the committed rules and routes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from driftguard.demo.processes import free_port
from driftguard.pipeline import look_around
from driftguard.store.database import Database
from tests.alerting.http_receiver import Receiver, http_receiver, wait_until
from tests.integration.committed_config import hastened_alertmanager, hastened_rules
from tests.integration.servers import (
    needs_alertmanager,
    needs_prometheus,
    running_alertmanager,
    running_prometheus,
)
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic

pytestmark = pytest.mark.slow

TIMES = 60.0  # a minute that a rule or a route waits is a second of the test
GOOD = {"code": 0.75, "english": 0.7, "german": 0.7}
BAD = {"code": 0.4, "english": 0.35, "german": 0.35}


@pytest.fixture
def impatient_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar looks around every half second instead of every five."""
    monkeypatch.setattr(look_around, "LOOK_SECONDS", 0.5)


def messages(receiver: Receiver, name: str) -> list[dict[str, Any]]:
    return [item.body for item in receiver.taken() if item.path == f"/hook/{name}"]


def pages(receiver: Receiver) -> list[dict[str, Any]]:
    """Of the drift. On a machine so busy that scrapes fail, the sidecar is a page as well."""
    told = messages(receiver, "pagerduty")
    return [page for page in told if page["payload"]["class"] == "DriftGuardAcceptanceDrift"]


def _tells_all(segments: list[str], told: list[dict[str, Any]]) -> bool:
    """Of alerts older than `group_wait`, Alertmanager sends the first that it receives without waiting for
    the rest of its group, and updates the page after `group_interval`. They are older where it was away."""
    return bool(told) and all(
        f"in segment {name} since 20" in told[-1]["payload"]["custom_details"]["firing"] for name in segments
    )


@needs_prometheus
@needs_alertmanager
@pytest.mark.usefixtures("impatient_sidecar")
def test_a_drift_pages_once_and_resolves_once_although_alertmanager_is_away_both_times(
    database: Database, tmp_path: Path
) -> None:
    for name in ("sidecar", "prometheus", "alertmanager"):
        (tmp_path / name).mkdir()
    port = free_port()
    with (
        http_receiver() as pager,
        running_sidecar(database, tmp_path / "sidecar") as sidecar,
        running_prometheus(
            tmp_path / "prometheus",
            [str(sidecar.base_url)],
            hastened_rules(TIMES),
            [f"http://127.0.0.1:{port}"],
        ) as prometheus,
    ):
        config = hastened_alertmanager(TIMES, pager.url)
        traffic = Traffic(seed=22, start=datetime.now(UTC) - timedelta(minutes=5), seconds_apart=0.09)
        post(sidecar, traffic.draw(1500, GOOD))
        post(sidecar, traffic.draw(300, BAD))
        wait_until(lambda: bool(prometheus.firing("DriftGuardAcceptanceDrift")), "the alerts")

        (incident,) = sidecar.get("/api/v1/incidents").json()["incidents"]
        segments = [segment["segment"] for segment in incident["segments"]]
        assert len(segments) > 1
        with running_alertmanager(tmp_path / "alertmanager", config, port=port):
            wait_until(lambda: _tells_all(segments, pages(pager)), "the page about all segments")
            wait_until(lambda: bool(messages(pager, "watchdog")), "the watchdog")

        resolve = f"/api/v1/incidents/{incident['id']}/resolve"
        assert sidecar.post(resolve, json={"reason": "rolled back"}).is_success
        wait_until(lambda: not prometheus.firing("DriftGuardAcceptanceDrift"), "the end of the alerts")

        with running_alertmanager(tmp_path / "alertmanager", config, port=port):
            wait_until(lambda: pages(pager)[-1]["event_action"] == "resolve", "the resolution")
            beats = len(messages(pager, "watchdog"))
            wait_until(lambda: len(messages(pager, "watchdog")) > beats + 1, "more of the watchdog")

        *triggers, resolution = pages(pager)
        assert [page["event_action"] for page in triggers] == ["trigger"] * len(triggers)
        assert resolution["event_action"] == "resolve"
        assert {page["dedup_key"] for page in triggers} == {resolution["dedup_key"]}, "one page at the pager"
        page = triggers[-1]
        told = page["payload"]["summary"]
        assert "Acceptance of draft v1 (draft_model) on chat fell from 0.7" in told
        assert "% slower" in told
        links = {link["text"]: httpx.URL(link["href"]).path for link in page["links"]}
        assert links["Incident"] == httpx.URL(page["client_url"]).path == f"/incidents/{incident['id']}"
        assert links["Runbook"].startswith("/runbooks/")
        assert sidecar.get(links["Stream"]).is_success
        assert all(sidecar.get(links[name]).is_success for name in ("Incident", "Runbook"))
