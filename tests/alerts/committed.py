"""The rules, their unit tests, the example of Alertmanager and the runbooks, as they are committed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from driftguard.alerting.rules.parameters import RuleParameters
from driftguard.metrics import Metrics

ALERTS = Path(__file__).parents[2] / "alerts"
RULES = ALERTS / "driftguard-rules.yaml"
ALERTMANAGER = ALERTS / "alertmanager.yml"
UNIT_TESTS = sorted((ALERTS / "tests").glob("*.yaml"))
RUNBOOKS = {file.stem: file for file in (ALERTS / "runbooks").glob("*.md")}
NAME = re.compile(r"(?:\w+:)?driftguard_\w+(?::\w+)?")  # of a metric, as a query names it
COMMITTED = RuleParameters(grafana_url="http://grafana:3000")  # of which the files are generated
ADDRESS = "http://driftguard:8200"  # of the sidecar, where nobody gives another one
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str | Path) -> None:
    found = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def load(file: Path) -> dict[str, Any]:
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def rules(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in document["groups"]:
        yield from group["rules"]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules(load(RULES)) if "alert" in rule]


@cache
def metric_names() -> frozenset[str]:
    """Of the sidecar and of the recording rules, as a query names them."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    exported = {
        family.name + suffix
        for family in Metrics().registry.collect()
        for suffix in suffixes.get(family.type, ("",))
    }
    return frozenset(exported | {rule["record"] for rule in rules(load(RULES)) if "record" in rule})


def queries(alert: str) -> list[str]:
    """The PromQL expressions of a runbook: one per line, a line that begins with a space goes on."""
    text = RUNBOOKS[alert].read_text(encoding="utf-8")
    blocks = re.findall(r"^```promql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [query for block in blocks for query in re.split(r"\n(?!\s)", block) if query]
