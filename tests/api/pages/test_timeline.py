"""What happened in an incident, on its page and by command."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from driftguard.app import Sidecar, create_app
from driftguard.cli.incidents import print_incident
from driftguard.settings import Settings
from driftguard.store import incidents
from driftguard.store.database import Database
from tests.alerting.incident_rows import add_incident, raise_to


def test_what_was_noted_of_an_incident_is_no_step_that_somebody_took(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A further fall was told under "acknowledged", and the end of a mitigation under "found"."""
    incident_id, now = add_incident(database, [], severity="warning"), datetime.now(UTC)
    with database.session() as session:
        incidents.move(session, incident_id, "acknowledged", "looking at it", now)
        found, _ = incidents.find(session, incident_id)
        incidents.note(session, found, "acceptance fell further in code", now)
    raise_to(database, incident_id, "critical", [])
    with database.session() as session:
        incidents.move(session, incident_id, "mitigating", "a draft is being trained", datetime.now(UTC))
        incidents.move(session, incident_id, "open", "the training failed", datetime.now(UTC))
    app = create_app(Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar"))
    client = TestClient(app, "http://127.0.0.1")
    page = client.get(f"/incidents/{incident_id}").text
    words = ["changed", "found", "acknowledged", "noted", "critical", "mitigating", "open"]
    assert re.findall(r'<li><time[^>]*>[^<]*</time> <span class="badge (\w+)">', page) == words
    print_incident(client.get(f"/api/v1/incidents/{incident_id}").json(), "http://sidecar")
    _, happened = capsys.readouterr().out.split("What happened:\n")
    told = [line.split("  ")[2].partition(":")[0] for line in happened.splitlines()]
    assert told == ["open", "acknowledged", "noted", "critical", "mitigating", "open"]
