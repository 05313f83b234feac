"""What Prometheus is given, and the links of runbooks, lead to the addresses that users open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient

from driftguard.alerting.rules.generate import rules_file
from driftguard.alerting.rules.parameters import RuleParameters
from driftguard.api import alert_rules
from driftguard.api.context import Context, get_context
from driftguard.api.pages import dashboards
from driftguard.api.problems import install_problem_handlers
from driftguard.settings import Settings
from tests.alerts.committed import needs_promtool, promtool

ADDRESSES = {"external_url": "https://drift.example.com/eu/", "grafana_url": "https://grafana.example.com"}


def get(path: str, alerting: dict[str, str]) -> Any:
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(alert_rules.router)
    app.include_router(dashboards.router)
    settings = Settings.model_validate({"alerting": alerting})
    context = Context(settings, None, None, None, None)  # type: ignore[arg-type]  # only settings are read
    app.dependency_overrides[get_context] = lambda: context
    return TestClient(app, base_url="http://sidecar:8200", follow_redirects=False).get(path)


@needs_promtool
def test_prometheus_takes_them_and_every_link_leads_to_the_configured_addresses(tmp_path: Path) -> None:
    answer = get("/alerts/rules.yaml", ADDRESSES)
    assert answer.headers["content-type"] == "application/yaml"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text == rules_file(
        RuleParameters(base_url="https://drift.example.com/eu", grafana_url="https://grafana.example.com")
    )
    (tmp_path / "rules.yaml").write_text(answer.text, encoding="utf-8")
    promtool("check", "rules", "--lint=all", "--lint-fatal", tmp_path / "rules.yaml")


def test_names_can_be_asked_for() -> None:
    query = "format=kubernetes&job_name=monitoring/driftguard&cluster_label=region"
    manifest = yaml.safe_load(get(f"/alerts/rules.yaml?{query}", ADDRESSES).text)
    assert manifest["kind"] == "PrometheusRule"
    text = str(manifest["spec"])
    assert 'up{job="monitoring/driftguard"}' in text
    assert "max by (region, server, target)" in text


def test_without_an_external_url_links_lead_to_where_it_was_asked_and_to_no_dashboard() -> None:
    text = get("/alerts/rules.yaml", {}).text
    assert "runbook_url: http://sidecar:8200/runbooks/DriftGuardRollback" in text
    assert "dashboard_url:" not in text


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("job_name=a%22b", "job_name: 'a\"b' has other characters"),
        ("cluster_label=server", "cluster_label: the rules need the label server"),
        ("threshold=1", "threshold"),
        ("format=toml", "format"),
    ],
)
def test_what_it_cannot_make_is_refused_by_name(query: str, named: str) -> None:
    answer = get(f"/alerts/rules.yaml?{query}", ADDRESSES)
    assert 400 <= answer.status_code < 500
    assert named in answer.json()["detail"]


@pytest.mark.parametrize("name", ["external_url", "grafana_url"])
def test_a_setting_that_rules_cannot_hold_is_refused_by_its_name(name: str) -> None:
    answer = get("/alerts/rules.yaml", {**ADDRESSES, name: "https://drift{b}.example.com"})
    assert answer.status_code == 500
    assert answer.json()["detail"].startswith(f"alerting.{name}: 'https://drift{{b}}.example.com' is not")


def test_a_runbook_leads_to_a_dashboard_or_says_what_is_not_set() -> None:
    answer = get("/dashboards/stream", ADDRESSES)
    assert answer.headers["location"] == "https://grafana.example.com/d/driftguard-stream"
    assert "alerting.grafana_url is not set" in get("/dashboards/stream", {}).json()["detail"]
    assert get("/dashboards/other", ADDRESSES).status_code == 404
