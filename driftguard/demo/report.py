"""How the demo ends: one table on the terminal, the same facts as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.box import HEAVY_HEAD
from rich.table import Table

from driftguard.demo.speeds import Change, typical
from driftguard.demo.stages import WITHOUT, Facts

PHASES = (WITHOUT, "before", "during", "after")


def summary_table(facts: Facts, *, framed: bool) -> Table:
    """Acceptance per route in each phase, and tokens per second in turns, measured in this run."""
    frame = HEAVY_HEAD if framed else None
    table = Table(title="What happened, measured in this run", box=frame)
    table.add_column("phase")
    routes = tuple(facts.acceptance["before"])
    for route in routes:
        table.add_column(f"acceptance, {route}", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("against before", justify="right")
    for phase in PHASES:
        if phase not in facts.acceptance:
            continue
        speeds, change = facts.tokens_per_second.get(phase), facts.changes.get(phase)
        table.add_row(
            phase,
            *(_number(facts.acceptance[phase][route], ".2f") for route in routes),
            _number(typical(speeds) if speeds else None, ".0f"),
            change.text if change else "-",
        )
    return table


def in_words(facts: Facts) -> list[str]:
    """What speculation and the new draft gave, or that this machine could not tell."""
    told = {
        "speculation": "Speculation on text that the draft knows",
        "repair": "The new draft against the old one, on the new text",
    }
    lines = [f"{words}: {_verdict(facts.changes[name])}." for name, words in told.items()]
    return [*lines, "Speeds were measured in turns, on engines with nothing else to do; with 95% intervals."]


def _verdict(change: Change) -> str:
    if not change.conclusive:
        return f"inconclusive on this machine ({change.interval} tokens per second)"
    return f"{change.text} tokens per second"


def write_json(facts: Facts, path: Path) -> None:
    path.write_text(json.dumps(asdict(facts), indent=2, default=str) + "\n", encoding="utf-8")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
