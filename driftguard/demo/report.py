"""How the demo ends: one table on the terminal, the same facts as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from driftguard.demo.stages import Facts

PHASES = ("without speculation", "before", "during", "after")


def summary_table(facts: Facts) -> Table:
    """Acceptance per route and tokens per second of each phase, measured in this run."""
    table = Table(title="What happened, measured in this run")
    table.add_column("phase")
    routes = tuple(facts.acceptance["before"])
    for route in routes:
        table.add_column(f"acceptance, {route}", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("against before", justify="right")
    before = facts.tokens_per_second.get("before")
    for phase in PHASES:
        if phase not in facts.acceptance:
            continue
        speed = facts.tokens_per_second[phase]
        table.add_row(
            phase,
            *(_number(facts.acceptance[phase][route], ".2f") for route in routes),
            _number(speed, ".0f"),
            f"{100 * (speed / before - 1):+.0f}%" if speed and before else "-",
        )
    return table


def write_json(facts: Facts, path: Path) -> None:
    path.write_text(json.dumps(asdict(facts), indent=2, default=str) + "\n", encoding="utf-8")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
