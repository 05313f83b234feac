"""The provisioning files: what Grafana needs to find the dashboards and a data source for them."""

from __future__ import annotations

from typing import Any

import yaml

from tests.dashboards.committed import DASHBOARDS, HERE


def provisioned(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((HERE / "provisioning" / name).read_text(encoding="utf-8"))
    assert document["apiVersion"] == 1
    return document


def test_the_guide_mounts_the_dashboards_where_the_provider_looks() -> None:
    (provider,) = provisioned("dashboards/driftguard.yaml")["providers"]
    guide = (HERE.parent / "docs" / "dashboards.md").read_text(encoding="utf-8")
    assert provider["type"] == "file"
    assert f"$PWD/dashboards:{provider['options']['path']}" in guide
    assert "$PWD/dashboards/provisioning:/etc/grafana/provisioning" in guide


def test_the_data_source_is_one_that_the_dashboards_offer() -> None:
    (source,) = provisioned("datasources/prometheus.yaml")["datasources"]
    for dashboard in DASHBOARDS.values():
        (variable,) = [item for item in dashboard["templating"]["list"] if item["type"] == "datasource"]
        assert variable["query"] == source["type"]
    assert source["isDefault"]


def test_nothing_but_dashboards_is_json_there() -> None:
    """Grafana takes every JSON file below the directory for a dashboard."""
    assert {path.stem for path in HERE.rglob("*.json")} == DASHBOARDS.keys()
