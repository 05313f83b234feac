"""The link in a page must open, and what it shows must work where it is copied to."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from driftguard.api.context import Context, get_context
from driftguard.api.pages import runbooks
from driftguard.api.problems import install_problem_handlers
from driftguard.settings import Settings
from tests.alerts.committed import RUNBOOKS

PARTS = ("What to do", "How to be sure", "Background")


def client(settings: Settings | None = None) -> TestClient:
    settings = settings or Settings()
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(runbooks.router)
    context = Context(settings, None, None, None, None)  # type: ignore[arg-type]  # only settings are read
    app.dependency_overrides[get_context] = lambda: context
    return TestClient(app, base_url="http://sidecar:8200")


@pytest.mark.parametrize("alert", sorted(RUNBOOKS))
def test_a_runbook_shows_its_parts_in_order_its_pages_and_commands_to_copy(alert: str) -> None:
    page = client().get(f"/runbooks/{alert}")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert f"<h1>{alert}</h1>" in page.text
    assert re.findall("<h2>(.*)</h2>", page.text)[: len(PARTS)] == list(PARTS)
    links = set(re.findall('href="http://sidecar:8200(/[^"]*)"', page.text))
    assert links & {"/", "/retraining"}
    assert links & {"/dashboards/fleet", "/dashboards/stream", "/dashboards/retraining"}
    assert "http://sidecar:8200" in page.text
    assert "$SIDECAR" not in page.text
    assert "<p>Set the names in capitals, before you paste.</p>" in page.text
    assert '<pre tabindex="0"><code class="language-sh">' in page.text


def test_the_address_in_commands_is_the_one_in_the_settings() -> None:
    settings = Settings.model_validate({"alerting": {"external_url": "https://drift.example.com/"}})
    page = client(settings).get("/runbooks/DriftGuardAcceptanceDrift").text
    assert "driftguard status --sidecar https://drift.example.com\n" in page
    assert "sidecar:8200" not in page


def test_a_table_is_a_table() -> None:
    page = client().get("/runbooks/DriftGuardAcceptanceDrift").text
    assert "| ---" not in page
    assert "<th>likely cause</th>" in page


def test_links_lead_to_pages_and_nothing_is_fetched_from_elsewhere() -> None:
    page = client().get("/runbooks/DriftGuardIncident")
    assert '<a href="DriftGuardAcceptanceDrift">' in page.text
    assert "<script" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_as_markdown_it_is_the_committed_file() -> None:
    answer = client().get("/runbooks/DriftGuardRollback.md")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == RUNBOOKS["DriftGuardRollback"].read_text(encoding="utf-8")


def test_an_unknown_alert_and_a_path_outside_are_refused() -> None:
    for name in ("Nothing", "..%2F..%2FREADME", "..%2F..%2FREADME.md"):
        answer = client().get(f"/runbooks/{name}")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
