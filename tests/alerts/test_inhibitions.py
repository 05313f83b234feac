"""Which alerts the committed inhibitions silence, by the real Alertmanager."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from tests.alerting.http_receiver import wait_until
from tests.integration.committed_config import committed_alertmanager
from tests.integration.servers import needs_alertmanager, running_alertmanager

pytestmark = needs_alertmanager

Labels = Mapping[str, str]
EU = {"cluster": "eu", "namespace": "llm"}
STREAM = {"server": "chat", "target": "llama", "draft_version": "v1", "method": "eagle3"}
DRIFT = {"alertname": "DriftGuardAcceptanceDrift", **EU, **STREAM, "direction": "down", "segment": "code"}
POSTED = {"alertname": "DriftGuardIncident", **EU, **STREAM, "incident": "1"}
DEAD = {
    "alertname": "DriftGuardSidecarUnhealthy",
    "severity": "critical",
    **EU,
    "instance": "a",
    "problem": "down",
}
SILENT = {
    "alertname": "DriftGuardSourceSilent",
    "severity": "warning",
    **EU,
    "server": "chat",
    "problem": "down",
}
LOSES = {"alertname": "DriftGuardThroughputCost", "severity": "warning", **EU, **STREAM, "judged": "measured"}


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("alertmanager")
    with running_alertmanager(directory, committed_alertmanager("http://127.0.0.1:9")) as url:
        yield url


def silenced(alertmanager: str, source: Labels, targets: Sequence[Labels]) -> list[Labels]:
    """Which of the targets are inhibited while `source` fires too; the first one must be, which shows that
    the inhibitions have been looked at."""
    api = f"{alertmanager}/api/v2/alerts"
    fired = [{"labels": labels} for labels in (source, *targets)]
    httpx.post(api, json=fired).raise_for_status()

    def found() -> list[Labels]:
        alerts = httpx.get(api).raise_for_status().json()
        inhibited = [alert["labels"] for alert in alerts if alert["status"]["inhibitedBy"]]
        return [labels for labels in targets if labels in inhibited]

    wait_until(lambda: targets[0] in found(), f"{targets[0]} to be silenced", timeout_seconds=10.0)
    return found()


@pytest.mark.parametrize(
    ("source", "target", "elsewhere"),
    [
        pytest.param(
            {**DRIFT, "severity": "critical"},
            {**DRIFT, "severity": "warning"},
            [*EU, *STREAM, "direction", "segment"],
            id="a drift that became critical is no warning any more",
        ),
        pytest.param(
            {**POSTED, "severity": "critical"},
            {**POSTED, "severity": "warning"},
            [*EU, *STREAM, "incident"],
            id="the same of an incident that the sidecar posts",
        ),
        pytest.param(
            {**DRIFT, "severity": "critical"},
            LOSES,
            [*EU, *STREAM],
            id="the page about a drift tells already what speculation costs",
        ),
        pytest.param(DEAD, SILENT, [*EU], id="a dead sidecar cannot judge its sources"),
    ],
)
def test_an_alert_is_silenced_by_one_of_the_same_place_and_by_no_other(
    alertmanager: str, source: Labels, target: Labels, elsewhere: list[str]
) -> None:
    others = [{**target, label: "another"} for label in elsewhere]
    assert silenced(alertmanager, source, [target, *others]) == [target]


def test_two_problems_of_one_sidecar_are_both_told(alertmanager: str) -> None:
    second = {**DEAD, "severity": "warning", "problem": "fold_lag"}
    assert silenced(alertmanager, DEAD, [SILENT, second]) == [SILENT]
