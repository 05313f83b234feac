"""The link in a page must open: every alert that the sidecar sends has a runbook."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.testclient import TestClient

from driftguard.alerting.alertmanager import ALERTNAME
from driftguard.api import runbooks
from driftguard.api.problems import install_problem_handlers


def client() -> TestClient:
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(runbooks.router)
    return TestClient(app)


def test_the_alert_has_a_runbook_with_its_four_parts() -> None:
    answer = client().get(f"/runbooks/{ALERTNAME}")
    assert answer.status_code == 200
    for part in ("## Meaning", "## Impact", "## Diagnosis", "## Mitigation"):
        assert part in answer.text


def test_an_unknown_alert_and_a_path_outside_are_refused() -> None:
    for name in ("Nothing", "..%2F..%2FREADME"):
        answer = client().get(f"/runbooks/{name}")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
