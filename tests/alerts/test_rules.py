"""The rules: what promtool says of them, their unit tests, and what every alert has to carry."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from driftguard.alerting.alertmanager import ALERTNAME
from tests.alerts.committed import (
    ADDRESS,
    NAME,
    RULES,
    RUNBOOKS,
    UNIT_TESTS,
    alerts,
    load,
    metric_names,
    needs_promtool,
    promtool,
    rules,
)
from tests.dashboards.committed import DASHBOARDS

GUIDE = RULES.parents[1] / "docs" / "alerting.md"
DATA_SOURCE = RULES.parents[1] / "dashboards" / "provisioning" / "datasources" / "prometheus.yaml"
SEVERITIES = ("critical", "warning", "info")
NAMES = {alert["alert"] for alert in alerts()}


@needs_promtool
def test_promtool_has_nothing_to_say() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


@needs_promtool
@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_unit_tests_of_the_rules(file: Path) -> None:
    promtool("test", "rules", file)


def test_every_alert_has_been_seen_firing_and_silent() -> None:
    seen: dict[str, set[bool]] = defaultdict(set)
    for file in UNIT_TESTS:
        for test in load(file)["tests"]:
            for case in test["alert_rule_test"]:
                seen[case["alertname"]].add(bool(case["exp_alerts"]))
    assert dict(seen) == {name: {True, False} for name in NAMES}


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_how_grave_it_is_what_happened_and_what_to_do(alert: dict[str, dict[str, str]]) -> None:
    severity, annotations = alert["labels"]["severity"], alert["annotations"]
    assert severity in SEVERITIES or (severity == "{{ $labels.severity }}" and "severity" in alert["expr"])
    assert annotations["runbook_url"] == f"{ADDRESS}/runbooks/{alert['alert']}"
    page = {"status_url"} if "status_url" in annotations else {"stream_url"}
    assert annotations.keys() - {"incident_url"} == {
        *("runbook_url", "dashboard_url", "summary", "description"),
        *page,
    }
    assert ("incident_url" in annotations) == ("driftguard_incident" in alert["expr"])
    assert all(annotations.values())


def test_the_dashboards_that_alerts_link_have_the_variables_that_the_links_set() -> None:
    for alert in alerts():
        found = re.search(r"/d/([\w-]+)\?(\S*)", alert["annotations"]["dashboard_url"])
        assert found
        dashboard = DASHBOARDS[found[1]]
        variables = {variable["name"] for variable in dashboard["templating"]["list"]}
        assert {"sidecar"} <= set(re.findall(r"var-(\w+)=", found[2])) <= variables


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert RUNBOOKS.keys() == NAMES | {ALERTNAME}


def test_the_alert_that_the_sidecar_posts_by_itself_has_a_name_of_its_own() -> None:
    assert ALERTNAME not in NAMES


def test_rules_speak_only_of_metrics_that_there_are() -> None:
    text = " ".join(
        str(part)
        for rule in rules(load(RULES))
        for part in (rule["expr"], *rule.get("annotations", {}).values())
    )
    named = set(NAME.findall(text))
    assert named <= metric_names()
    assert len(named) > 20


@pytest.mark.parametrize("file", [RULES, GUIDE], ids=lambda file: file.name)
def test_prometheus_scrapes_as_often_as_pages_and_dashboards_expect(file: Path) -> None:
    """Every minute unless told: pages come as late, and rates over Grafana's shortest window are empty."""
    lines = [line.lstrip("# ") for line in file.read_text(encoding="utf-8").splitlines()]
    (job,) = [number for number, line in enumerate(lines) if line.startswith("- job_name: driftguard")]
    (source,) = load(DATA_SOURCE)["datasources"]
    assert lines[job + 1].split(" #")[0].strip() == f"scrape_interval: {source['jsonData']['timeInterval']}"
