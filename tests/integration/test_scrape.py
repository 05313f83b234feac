"""Prometheus scrapes a live sidecar: what it stores is what the sidecar counted."""

from __future__ import annotations

import httpx
import pytest

from tests.alerting.http_receiver import wait_until
from tests.alerts.committed import RUNBOOKS, queries
from tests.integration.servers import Prometheus


def test_prometheus_sees_the_traffic_and_the_incident(
    drifted_sidecar: httpx.Client, prometheus: Prometheus
) -> None:
    (incident,) = drifted_sidecar.get("/api/v1/incidents").json()["incidents"]
    of_it = f'severity="{incident["severity"]}", direction="down"'
    expected = {
        'up{job="driftguard"}': [1],
        "sum(driftguard_records_total)": [1500 + 300 + 3 * 30],
        f"driftguard_incidents_open{{{of_it}}}": [1],
        "sum(driftguard_incidents_open)": [1],
        'driftguard_stream_verdict{verdict="degraded"}': [1],
        "stream:driftguard_acceptance:ratio_rate5m": [pytest.approx((0.75 + 0.7 + 0.35) / 3, abs=0.05)],
    }
    # With the next scrape at the latest: of one that took too long there is nothing to see.
    wait_until(lambda: {name: prometheus.values(name) for name in expected} == expected, f"{expected}")


@pytest.mark.parametrize("alert", sorted(RUNBOOKS))
def test_prometheus_takes_every_query_of_a_runbook(prometheus: Prometheus, alert: str) -> None:
    for query in queries(alert):
        prometheus.query(query)


def test_the_rules_of_a_sidecar_in_order_are_silent_but_for_its_incident(prometheus: Prometheus) -> None:
    """Nothing pends or fires that has no cause: a rule that looks for a metric under a wrong name would."""
    wait_until(lambda: bool(prometheus.firing("DriftGuardAcceptanceDrift")), "the alert")
    wait_until(
        lambda: (
            {alert["labels"]["alertname"] for alert in prometheus.alerts()}
            == {"DriftGuardAcceptanceDrift", "DriftGuardWatchdog"}
        ),
        "no other alert, such as that of a scrape that took too long",
    )
