"""What a runbook gives to copy must be there: metrics by their names, and commands."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from driftguard.cli import app
from tests.alerts.committed import RUNBOOKS, metric_names, queries


@pytest.mark.parametrize("alert", sorted(RUNBOOKS))
def test_queries_ask_for_metrics_that_there_are(alert: str) -> None:
    named = {
        name for query in queries(alert) for name in re.findall(r"(?:\w+:)?driftguard_\w+(?::\w+)?", query)
    }
    assert named <= metric_names()


@pytest.mark.parametrize("alert", sorted(RUNBOOKS))
def test_commands_are_commands(alert: str) -> None:
    text = RUNBOOKS[alert].read_text(encoding="utf-8")
    commands: Any = typer.main.get_command(app)
    named = set(re.findall(r"(?:^|`)\s*driftguard ([\w-]+) ?([\w-]*)", text, re.MULTILINE))
    assert {noun for noun, _ in named} <= set(commands.commands)
    for noun, verb in named:
        assert verb in getattr(commands.commands[noun], "commands", [verb]), f"{noun} {verb}"
