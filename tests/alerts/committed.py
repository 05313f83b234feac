"""The Prometheus rules, their unit tests, the Alertmanager example and the runbooks, as they are committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ALERTS = Path(__file__).parents[2] / "alerts"
RULES = ALERTS / "driftguard-rules.yaml"
ALERTMANAGER = ALERTS / "alertmanager.yml"
UNIT_TESTS = sorted((ALERTS / "tests").glob("*.yaml"))
RUNBOOKS = {file.stem: file for file in (ALERTS / "runbooks").glob("*.md")}
ADDRESS = "http://driftguard:8200"  # that a user replaces by the sidecar's own


def load(file: Path) -> dict[str, Any]:
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def rules(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in document["groups"]:
        yield from group["rules"]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules(load(RULES)) if "alert" in rule]
