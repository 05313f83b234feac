"""What the detector knows, in the status of the API, on the page and at the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import text as sql
from sqlalchemy import update

from driftguard.records import AcceptanceRecord
from driftguard.store.database import Database
from driftguard.store.tables import Stream
from tests.alerting.incident_rows import add_incident
from tests.api.test_status_and_incidents import GOOD, folded, live_traffic
from tests.cli.test_main import driftguard
from tests.pipeline.sidecar import post, running_sidecar


@pytest.fixture
def client(database: Database, tmp_path: Path) -> Iterator[httpx.Client]:
    with running_sidecar(database, tmp_path) as client:
        yield client


def status(client: httpx.Client) -> tuple[dict[str, Any], dict[str, Any]]:
    folded(client)
    (stream,) = client.get("/api/v1/status").json()["streams"]
    return stream, {segment["segment"]: segment for segment in stream["segments"]}


def with_k(records: list[AcceptanceRecord], k: int) -> list[AcceptanceRecord]:
    return [msgspec.structs.replace(record, num_speculative_tokens=k) for record in records]


def test_why_a_segment_is_not_watched_and_why_its_baseline_was_begun(client: httpx.Client) -> None:
    traffic = live_traffic(51)
    post(client, with_k(traffic.draw(40, GOOD), 4))
    stream, segments = status(client)
    assert segments["code"]["learning"].endswith(": first baseline of the segment")
    assert segments["code"]["expected_delays"] == []
    assert segments["code"]["baseline_reason"] is None
    assert stream["requests_per_day"] is None

    post(client, with_k(traffic.draw(500, GOOD), 4))
    stream, segments = status(client)
    assert segments["code"]["learning"] is None
    assert segments["code"]["baseline_reason"] == "first baseline of the segment"

    post(client, with_k(traffic.draw(100, GOOD), 6))
    _, segments = status(client)
    assert segments["code"]["learning"].endswith(": num_speculative_tokens changed from 4 to 6")
    post(client, with_k(traffic.draw(300, GOOD), 6))
    stream, segments = status(client)
    assert segments["code"]["baseline_reason"] == "num_speculative_tokens changed from 4 to 6"
    assert stream["verdict"] == "steady"


def test_sentences_that_an_earlier_version_stored_are_still_shown(
    client: httpx.Client, database: Database
) -> None:
    post(client, live_traffic(54).draw(1000, GOOD))
    status(client)
    stored = sql(
        "UPDATE detector_states SET summary = jsonb_set(summary, '{segments,0,baseline_reason}', :told)"
    )
    with database.session() as session:
        session.execute(stored, {"told": '"temperature changed from unknown to greedy"'})
    (stream,) = client.get("/api/v1/status").json()["streams"]
    assert stream["segments"][0]["baseline_reason"] == "temperature changed from unknown to greedy"


def test_what_is_promised_in_requests_and_in_days_and_how_soon_a_drop_is_found(client: httpx.Client) -> None:
    post(client, live_traffic(52).draw(1000, GOOD))
    stream, segments = status(client)
    assert client.get("/api/v1/status").json()["false_alarm_days"] == 0.1
    assert stream["requests_per_day"] == pytest.approx(5 * 86_400, rel=0.02)  # one in 0.2 seconds
    promised = stream["false_alarms"]
    assert promised["requests"] == 100_000.0  # a tenth of a day would be less than the minimum
    assert promised["days"] == pytest.approx(100_000.0 / stream["requests_per_day"])
    small, large = segments["code"]["expected_delays"]
    assert (small["drop"], large["drop"]) == (0.05, 0.1)
    assert small["requests"] >= large["requests"] > 10  # both may wait until the stream is no longer young
    assert large["seconds"] == pytest.approx(large["requests"] * 2 * 0.2, rel=0.02)  # every other request
    page = client.get(f"/streams/{stream['id']}").text
    assert promised["text"] == "at most one false page in 5.5 h (100,000 requests)"
    for text in (
        large["text"],
        "one in 5.5 h",
        "100,000 requests",
        "setting 0.1 days",
        "No request names its session",
    ):
        assert text in " ".join(page.split())
    told = driftguard("status", "--sidecar", str(client.base_url)).stdout
    for text in (large["text"], promised["text"], "sessions: not given"):
        assert text in told


def test_days_and_delays_are_those_of_the_present_traffic(client: httpx.Client, database: Database) -> None:
    traffic = live_traffic(54)
    post(client, traffic.draw(1000, GOOD))
    before, segments = status(client)
    with database.session() as session:
        session.execute(update(Stream).values(first_seen_at=datetime.now(UTC) - timedelta(days=3)))
    stream, now = status(client)
    assert stream["requests_per_day"] == 1000.0  # began with 432,000
    assert stream["false_alarms"]["requests"] == before["false_alarms"]["requests"]
    assert stream["false_alarms"]["text"] == "at most one false page in 100 days (100,000 requests)"
    slower = before["requests_per_day"] / 1000.0
    for old, new in zip(segments["code"]["expected_delays"], now["code"]["expected_delays"], strict=True):
        assert new["requests"] == old["requests"]
        assert new["seconds"] == pytest.approx(slower * old["seconds"])
        assert " days)" in new["text"] or " h)" in new["text"]


def test_sessions_and_windows_after_a_gap_are_counted(client: httpx.Client) -> None:
    traffic = live_traffic(53)
    records = traffic.draw(30, GOOD)
    windows = [
        msgspec.structs.replace(record, kind="window", fidelity="counter")
        for record in records[:20] + records[25:]
    ]
    post(client, windows)
    stream, _ = status(client)
    assert stream["sessions"] == "no requests"
    assert stream["windows_after_gap"] > 0
    named = [msgspec.structs.replace(record, session="s1") for record in traffic.draw(10, GOOD)]
    for requests, told in ((named, "given"), (traffic.draw(10, GOOD), "in part")):
        post(client, requests)
        stream, _ = status(client)
        assert stream["sessions"] == told
    assert "Some requests name no session" in client.get(f"/streams/{stream['id']}").text


def test_windows_are_nowhere_told_as_requests(client: httpx.Client) -> None:
    """A scraped server has thousands of requests a window."""
    traffic = live_traffic(58)
    requests = traffic.draw(1000, GOOD)
    post(client, [msgspec.structs.replace(item, kind="window", fidelity="counter") for item in requests])
    stream, segments = status(client)
    assert segments["code"]["learning"] is None
    assert stream["requests_per_day"] > 0
    assert stream["false_alarms"]["text"].endswith(" windows)")
    told = driftguard("status", "--sidecar", str(client.base_url)).stdout
    page = " ".join(client.get(f"/streams/{stream['id']}").text.split())
    assert f"{stream['requests_per_day']:,.0f} windows per day" in told
    for text in (told, page):
        assert not re.search(r"[\d,]+ requests\b|[Rr]equests (per day|read)|>Requests<", text)
        assert "indows" in text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_incident_page_lets_a_person_decide(database: Database, tmp_path: Path, host: str) -> None:
    incident_id = add_incident(database, [])
    with running_sidecar(database, tmp_path, host=host) as client:
        page = client.get(f"/incidents/{incident_id}").text
    for action in ("acknowledge", "resolve", "accept"):
        assert f'data-post="/api/v1/incidents/{incident_id}/{action}"' in page
    assert ('id="key"' in page) is (host != "127.0.0.1")
    with running_sidecar(database, tmp_path) as client:
        client.post(f"/api/v1/incidents/{incident_id}/accept", json={"reason": "a new tenant"})
        page = client.get(f"/incidents/{incident_id}").text
    assert "data-post" not in page
    assert "the operator accepted the new level as normal: a new tenant" in page
