"""The example configuration of Alertmanager: is it valid, and who hears of what."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from driftguard.alerting.alertmanager import ALERTNAME
from tests.alerts.committed import ALERTMANAGER, RULES, alerts, load
from tests.deploy.committed import DEPLOY, documents

pytestmark = pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed")

RECEIVERS = {"critical": "pagerduty,slack", "warning": "slack", "info": "mail"}


def amtool(*arguments: str) -> str:
    found = subprocess.run(["amtool", *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.strip()


def receiver(alertname: str, severity: str) -> str:
    labels = (f"alertname={alertname}", f"severity={severity}")
    return amtool("config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels)


def test_amtool_takes_it() -> None:
    assert "SUCCESS" in amtool("check-config", str(ALERTMANAGER))


@pytest.mark.parametrize("severity", RECEIVERS)
def test_who_hears_depends_on_how_grave_it_is(severity: str) -> None:
    names = {alert["alert"] for alert in alerts()} - {"DriftGuardWatchdog"}
    assert {receiver(name, severity) for name in names | {ALERTNAME}} == {RECEIVERS[severity]}


def test_the_watchdog_goes_to_the_dead_mans_switch() -> None:
    assert receiver("DriftGuardWatchdog", "info") == "dead-mans-switch"


def test_no_turn_of_the_group_is_too_early_for_the_next_ping() -> None:
    """Alertmanager repeats at a turn of the group only, and leaves out one that comes a little early."""
    (route,) = (
        each for each in load(ALERTMANAGER)["route"]["routes"] if each["receiver"] == "dead-mans-switch"
    )
    assert seconds(route["repeat_interval"]) < 0.9 * seconds(route["group_interval"])


def test_what_the_committed_files_wait_for_leaves_a_page_within_two_scrape_intervals() -> None:
    """At worst a drift waits for a scrape, then for the rule, then for its group."""
    intervals = load(DEPLOY / "compose" / "prometheus.yml")["global"]
    scrape = seconds(intervals["scrape_interval"])
    (group,) = (
        group
        for group in load(RULES)["groups"]
        if any(rule.get("alert") == "DriftGuardAcceptanceDrift" for rule in group["rules"])
    )
    assert all("for" not in rule for rule in group["rules"])
    route = load(ALERTMANAGER)["route"]
    group_wait = max(seconds(each.get("group_wait", "0s")) for each in (route, *route["routes"]))
    assert scrape + seconds(group["interval"]) + group_wait < 2 * scrape
    of_sidecars = documents(DEPLOY / "kubernetes" / "monitoring" / "monitors.yaml")[0]
    (endpoint,) = of_sidecars["spec"]["endpoints"]
    assert seconds(endpoint["interval"]) == scrape


def seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]
