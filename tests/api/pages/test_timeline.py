"""What happened in an incident, on its page and by command."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from driftguard.alerting.destination import webhooks
from driftguard.app import Sidecar, create_app
from driftguard.cli.incidents import print_incident
from driftguard.settings import AlertingSettings, Settings
from driftguard.store import incidents, notifications
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


def test_what_nobody_posts_any_more_is_not_told_as_awaited(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the token in a webhook's address was wrong, and is another one now: both look alike when shown."""
    wrong, right = (f"http://hooks.example.com/{token}" for token in ("wrong", "right"))
    incident_id = add_incident(database, webhooks([wrong, right]))
    with database.session() as session:
        for row in notifications.of_incident(session, incident_id):
            row.last_error, row.attempts = "HTTP 403", 1
    alerting = AlertingSettings(webhook_urls=[right])
    app = create_app(Sidecar(Settings(data_dir=tmp_path, alerting=alerting), database, "http://sidecar"))
    client = TestClient(app, "http://127.0.0.1")

    def shown() -> tuple[str, int, int]:
        """The end of the heading, the rows, and those of what is not posted by this sidecar."""
        page = client.get(f"/incidents/{incident_id}").text
        heading, _, rows = page.partition("<h2>Not delivered")[2].partition("</h2>")
        marked = "not in the settings of this sidecar"
        return heading, rows.count("webhook:http://hooks.example.com"), rows.count(marked)

    assert shown() == (" yet", 2, 1)
    incident = client.get(f"/api/v1/incidents/{incident_id}").json()
    assert sorted(told["in_settings"] for told in incident["notifications"]) == [False, True]
    print_incident(incident, "http://sidecar")
    told = capsys.readouterr().out.partition("Who was told:")[2]
    assert told.count("not delivered, and not in the settings of this sidecar") == 1
    with database.session() as session:
        (posted,) = webhooks([right])
        told_of = [(incident_id, "firing", "critical")]
        notifications.mark(session, posted, told_of, at=datetime.now(UTC), error=None)
    assert shown() == ("", 1, 1)
