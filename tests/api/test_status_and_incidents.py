"""Status, incidents, series, health and the page over real HTTP, on data that was folded for real."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import event, text

from driftguard.alerting.destination import webhooks
from driftguard.alerting.webhook import Webhook
from driftguard.metrics import Metrics
from driftguard.store import retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import Draft, RetrainRun, Stream
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident, add_stream, resolve
from tests.api.pages.reading import text_of
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic

GOOD = {"code": 0.75, "<i>german</i>": 0.7}
BAD = {**GOOD, "<i>german</i>": 0.35}


@pytest.fixture
def client(database: Database, tmp_path: Path) -> Iterator[httpx.Client]:
    with running_sidecar(database, tmp_path) as client:
        yield client


def folded(client: httpx.Client) -> None:
    wait_until(lambda: client.get("/api/v1/status").json()["unfolded_records"] == 0, "the fold")


def examined(client: httpx.Client) -> None:
    """An incident is told what it costs, and why it is, after the fold that opened it."""

    def diagnoses() -> list[object]:
        return [incident["diagnosis"] for incident in client.get("/api/v1/incidents").json()["incidents"]]

    wait_until(lambda: bool(diagnoses()) and None not in diagnoses(), "the examination of the incident")


def recent_traffic(seed: int, minutes: int = 40) -> Traffic:
    return Traffic(seed=seed, start=datetime.now(UTC) - timedelta(minutes=minutes))


def live_traffic(seed: int) -> Traffic:
    """Up to 1,400 records that end within the last five minutes."""
    return Traffic(seed=seed, start=datetime.now(UTC) - timedelta(minutes=4.8), seconds_apart=0.2)


def test_the_status_goes_from_insufficient_to_steady_to_degraded(client: httpx.Client) -> None:
    assert client.get("/api/v1/status").json()["streams"] == []
    traffic = live_traffic(1)
    post(client, traffic.draw(40, GOOD))
    folded(client)
    (stream,) = client.get("/api/v1/status").json()["streams"]
    assert stream["verdict"] == "insufficient_data"
    assert stream["sample_size"] == 40
    assert stream["requests_missing"] > 0
    assert str(stream["requests_missing"]) in stream["text"]

    post(client, traffic.draw(1000, GOOD))
    folded(client)
    (stream,) = client.get("/api/v1/status").json()["streams"]
    assert stream["verdict"] == "steady"
    assert stream["acceptance"]["baseline"]["rate"] == pytest.approx(0.725, abs=0.02)
    assert stream["tokens_per_second"]["cost_percent"] is None

    post(client, traffic.draw(300, BAD))
    folded(client)
    examined(client)
    (stream,) = client.get("/api/v1/status").json()["streams"]
    verdicts = {segment["segment"]: segment["verdict"] for segment in stream["segments"]}
    assert verdicts == {"code": "steady", "<i>german</i>": "degraded"}
    assert stream["verdict"] == "degraded"
    # 1 + 4 x 0.7 tokens per step before, 1 + 4 x 0.35 after, at equal seconds per step.
    assert stream["tokens_per_second"]["cost_percent"] == pytest.approx(37, abs=6)


def test_a_replaced_draft_is_named_as_such_and_the_new_one_is_in_service(
    client: httpx.Client, database: Database
) -> None:
    traffic = live_traffic(2)
    post(client, traffic.draw(600, GOOD))
    promoted_at = traffic.clock
    with database.session() as session:
        session.add(
            Draft(
                server="chat",
                target="target",
                version="v2",
                name="v2",
                method="draft_model",
                directory=None,
                parent_version="v1",
                state="in_service",
                created_at=promoted_at,
                promoted_at=promoted_at,
                retired_at=None,
                retrain_run_id=None,
            )
        )
    post(client, traffic.draw(50, GOOD, draft_version="v2"))
    folded(client)
    new, old = client.get("/api/v1/status").json()["streams"]
    assert (new["draft_version"], new["in_service"], new["draft_in_service"]) == ("v2", True, "v2")
    assert (old["draft_version"], old["in_service"], old["verdict"]) == ("v1", False, "replaced")
    series = client.get(f"/api/v1/streams/{new['id']}/acceptance?minutes=60").json()
    assert [promotion["draft_version"] for promotion in series["promotions"]] == ["v2"]
    assert {line["draft_version"] for line in series["lines"]} == {"v1", "v2"}


@pytest.mark.parametrize("minutes", [15, 90])
def test_a_series_adds_up_to_the_records_at_any_width(client: httpx.Client, minutes: int) -> None:
    records = recent_traffic(3, minutes=10).draw(300, GOOD)
    post(client, records)
    (stream,) = client.get("/api/v1/status").json()["streams"]
    series = client.get(f"/api/v1/streams/{stream['id']}/acceptance?minutes={minutes}").json()
    assert series["bin_seconds"] == {15: 5, 90: 60}[minutes]
    for segment in (None, "code"):
        (line,) = [line for line in series["lines"] if line["segment"] == segment]
        mine = [record for record in records if segment in (None, record.segment)]
        assert sum(point["drafted"] for point in line["points"]) == sum(r.drafted for r in mine)
        assert sum(point["accepted"] for point in line["points"]) == sum(r.accepted for r in mine)
        point = line["points"][0]
        assert point["acceptance"] == pytest.approx(point["accepted"] / point["drafted"], abs=1e-6)
        assert point["acceptance_length"] == pytest.approx(point["emitted"] / point["steps"], abs=1e-6)


def test_an_unknown_stream_is_a_problem_that_names_it(client: httpx.Client) -> None:
    answer = client.get("/api/v1/streams/999/acceptance")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert "999" in answer.json()["detail"]


def test_an_incident_can_be_acknowledged_then_resolved_and_then_nothing_more(
    client: httpx.Client, database: Database
) -> None:
    url = f"/api/v1/incidents/{add_incident(database, [])}"
    assert client.post(f"{url}/acknowledge", json={"reason": "looking"}).json()["state"] == "acknowledged"
    answer = client.post(f"{url}/acknowledge", json={"reason": "again"})
    assert answer.status_code == 409
    assert answer.json()["legal"] == ["mitigating", "recovered_in_part", "resolved"]
    assert client.post(f"{url}/resolve", json={"reason": "new tenant"}).json()["state"] == "resolved"
    answer = client.post(f"{url}/resolve", json={"reason": "again"})
    assert (answer.status_code, answer.json()["legal"]) == (409, [])
    steps = [(step["to_state"], step["reason"]) for step in client.get(url).json()["transitions"]]
    assert steps == [
        ("open", "acceptance fell from 0.74 to 0.58"),
        ("acknowledged", "looking"),
        ("resolved", "new tenant"),
    ]


def test_the_fleet_says_no_alarm_only_while_no_incident_is_open(
    client: httpx.Client, database: Database
) -> None:
    """Such as that of a draft which a better one has replaced, while its page goes on."""

    def headline() -> str:
        return client.get("/").text.partition('<h1 id="headline">')[2].partition("</h1>")[0]

    incident_id = add_incident(database, [], stream_id=(before := add_stream(database, "v1")))
    with database.session() as session:
        session.get_one(Stream, before).last_seen_at -= timedelta(days=2)
    add_stream(database, "v2")
    assert headline() == "1 open incident: 0 of 1 stream steady"
    resolve(database, incident_id)
    assert headline() == "No alarm: 0 of 1 stream steady"


@pytest.mark.parametrize("body", [{}, {"reason": ""}, {"reason": "  "}, {"reason": "x", "by": "me"}])
def test_a_change_without_a_reason_is_refused_by_name(
    client: httpx.Client, database: Database, body: dict[str, str]
) -> None:
    answer = client.post(f"/api/v1/incidents/{add_incident(database, [])}/resolve", json=body)
    assert answer.status_code == 422
    assert ("by" if "by" in body else "reason") in answer.json()["detail"]


def test_pages_of_incidents_follow_each_other_without_gap_or_repetition(
    client: httpx.Client, database: Database
) -> None:
    same_moment = datetime.now(UTC)
    wanted = {
        str(add_incident(database, [], stream_id=add_stream(database, f"v{number}"), opened_at=same_moment))
        for number in range(7)
    }
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = client.get("/api/v1/incidents", params={"limit": 3, **({"cursor": cursor} if cursor else {})})
        seen += [incident["id"] for incident in page.json()["incidents"]]
        cursor = page.json()["next_cursor"]
        if cursor is None:
            break
    assert len(seen) == 7
    assert set(seen) == wanted
    client.post(f"/api/v1/incidents/{seen[0]}/resolve", json={"reason": "done"})
    resolved = client.get("/api/v1/incidents?state=resolved").json()["incidents"]
    assert [incident["id"] for incident in resolved] == [seen[0]]
    assert len(client.get("/api/v1/incidents?state=unresolved").json()["incidents"]) == 6
    stream_id = resolved[0]["stream"]["id"]
    assert len(client.get(f"/api/v1/incidents?stream={stream_id}").json()["incidents"]) == 1


@pytest.mark.parametrize("query", ["cursor=nonsense", "cursor=fHg", "limit=0", "state=closed"])
def test_a_bad_query_is_refused_by_name(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/api/v1/incidents?{query}")
    assert answer.status_code == 422
    assert query.split("=", maxsplit=1)[0] in answer.json()["detail"]


def test_the_path_of_a_webhook_is_never_shown(client: httpx.Client, database: Database) -> None:
    url = "https://user:word@localhost:9/services/secret"
    incident_id = add_incident(database, webhooks([url]))
    Webhook(database, url, "http://sidecar", Metrics()).deliver()
    for path in (f"/api/v1/incidents/{incident_id}", f"/incidents/{incident_id}"):
        body = client.get(path).text
        assert "webhook:https://localhost:9" in body
        assert "secret" not in body
        assert "word@" not in body


def test_readiness_fails_when_the_schema_does_not_fit_and_liveness_does_not(
    client: httpx.Client, database: Database
) -> None:
    assert client.get("/readyz").json()["status"] == "ready"
    with database.session() as session:
        session.execute(text("UPDATE alembic_version SET version_num = 'unknown'"))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert client.get("/healthz").status_code == 200


def test_the_metrics_follow_the_traffic(client: httpx.Client) -> None:
    records = recent_traffic(4).draw(100, GOOD)
    post(client, records)
    folded(client)

    def drafted() -> float:
        found = re.findall(
            r"^driftguard_draft_tokens_total\{.*\} (\S+)$", client.get("/metrics").text, re.MULTILINE
        )
        return sum(map(float, found))

    wait_until(lambda: drafted() == sum(record.drafted for record in records), "the counters")


def test_the_page_says_what_the_api_says_and_escapes_what_senders_chose(client: httpx.Client) -> None:
    traffic = live_traffic(5)
    post(client, traffic.draw(1000, GOOD) + traffic.draw(300, BAD))
    folded(client)

    def on_both() -> bool:
        (stream,) = client.get("/api/v1/status").json()["streams"]
        shown = text_of(client.get("/").text)
        return stream["text"] in shown and f"{stream['acceptance']['now']['rate']:.3f}" in shown

    # The cost of an incident is completed behind the fold, perhaps between the two answers.
    wait_until(on_both, "the page to say what the API says")
    (stream,) = client.get("/api/v1/status").json()["streams"]
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert stream["verdict"] == "degraded"
    assert "<i>german</i>" not in page.text
    incident = client.get(f"/incidents/{stream['incident_id']}")
    assert incident.status_code == 200
    assert "Acceptance of draft v1" in incident.text


def test_everything_that_the_page_loads_is_served_here(client: httpx.Client) -> None:
    page = client.get("/").text
    assert "No records yet" in page
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert all(link.startswith(("/", "#", "data:")) for link in links)
    for link in links:
        if link.startswith("/static/"):
            assert client.get(link).status_code == 200, link
    assert client.get("/static/../page.py").status_code == 404
    assert client.get("/incidents/00000000-0000-0000-0000-000000000000").status_code == 404


@pytest.mark.parametrize("path", ["/streams/999", "/retraining/00000000-0000-0000-0000-000000000000"])
def test_a_page_of_nothing_is_not_found(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404
    assert client.get("/streams/9223372036854775808").status_code == 422


def test_the_status_reads_the_streams_once(client: httpx.Client, database: Database) -> None:
    post(client, live_traffic(6).draw(10, GOOD))
    seen: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if threading.current_thread().name.startswith("AnyIO"):  # not the sidecar's own
            seen.append(statement)

    folded(client)
    event.listen(database.engine, "before_cursor_execute", note)
    client.get("/api/v1/status").raise_for_status()
    event.remove(database.engine, "before_cursor_execute", note)
    reads = [one for one in seen if "FROM streams ORDER BY" in " ".join(one.split())]
    assert len(reads) == 1


def test_a_promotion_stays_in_the_history_of_its_incident_however_many_drafts_follow(
    client: httpx.Client, database: Database
) -> None:
    incident_id, at = add_incident(database, []), datetime(2026, 3, 1, 12, tzinfo=UTC)
    place = {"server": "chat", "target": "target", "method": "draft_model"}
    run = RetrainRun(
        id=uuid4(), server="chat", target="target", incident_id=incident_id, trigger="incident",
        state="promoted", started_at=at, ended_at=at,
    )  # fmt: skip
    with database.session() as session:
        retrain_runs.begin(session, run)
        session.add(
            Draft(
                **place,
                version="cured",
                name="cured",
                state="retired",
                created_at=at,
                promoted_at=at,
                retrain_run_id=run.id,
            )
        )
        for number in range(20):
            later = at + timedelta(days=1 + number)
            session.add(Draft(**place, version=f"v{number}", name="", state="rejected", created_at=later))
    assert "draft cured put into service" in client.get(f"/incidents/{incident_id}").text
