"""Taking a change that repeats as usual: over HTTP, from the command line, on the page."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from driftguard.records.documents.incident import Repeats
from driftguard.store import incidents
from driftguard.store.database import Database
from tests.alerting.incident_rows import add_incident, add_stream
from tests.cli.test_main import driftguard
from tests.pipeline.sidecar import running_sidecar

SATURDAY = datetime(2026, 11, 14, 0, 31, tzinfo=UTC)


def repeating(database: Database) -> tuple[UUID, UUID]:
    """An incident and the one that it looks like."""
    stream_id = add_stream(database)
    earlier = add_incident(database, [], stream_id=stream_id)
    with database.session() as session:
        incidents.move(session, earlier, "resolved", "over", datetime.now(UTC))
    incident_id = add_incident(database, [], stream_id=stream_id, severity="info")
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        repeats = Repeats("week", earlier, SATURDAY, SATURDAY + timedelta(days=2))
        incident.evidence = replace(incident.evidence, repeats=repeats)
    return incident_id, earlier


def test_the_question_is_on_the_page_and_answered_by_its_button(database: Database, tmp_path: Path) -> None:
    incident_id, earlier = repeating(database)
    with running_sidecar(database, tmp_path) as client:
        page = client.get(f"/incidents/{incident_id}").text
        assert "Is it usual on Saturdays?" in page
        assert "Usual on Saturdays" in page
        assert f'href="/incidents/{earlier}"' in page
        url = f"/api/v1/incidents/{incident_id}/usual"
        assert url in page
        assert client.post(url, json={"reason": " "}).status_code == 422
        told = client.post(url, json={"reason": "nobody codes then"}).json()
        assert told["resolution"] == "the operator said that it is usual on Saturdays: nobody codes then"
        assert told["evidence"]["repeats"]["usual"] is True
        assert client.post(url, json={"reason": "again"}).status_code == 409
        assert url not in client.get(f"/incidents/{incident_id}").text


def test_from_the_command_line(database: Database, tmp_path: Path) -> None:
    incident_id, _ = repeating(database)
    with running_sidecar(database, tmp_path) as client:
        command = ("usual", "--reason", "nobody codes then", "--sidecar", str(client.base_url))
        done = driftguard(*command, str(incident_id))
        assert (done.returncode, done.stderr) == (0, "")
        assert "is expected to change so every week" in done.stdout
        other = add_incident(database, [], stream_id=add_stream(database, "v2"))
        refused = driftguard(*command, str(other))
        assert refused.returncode == 1
        assert f"incident {other} repeats none before it" in refused.stderr
        assert client.get(f"/api/v1/incidents/{other}").json()["state"] == "open"
