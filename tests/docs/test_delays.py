"""The delays that README and guides quote are those of the committed table."""

from __future__ import annotations

import re
from typing import Final

from tests.deploy.committed import ROOT

DROPS: Final = ("0.05", "0.10", "0.20")
TABLE: Final = (ROOT / "tests" / "benchmarks" / "results" / "detection.md").read_text(encoding="utf-8")
ONE, SMALL, SESSIONS = "one segment", "only a 10% segment falls", "sessions, adjacent"
QUOTED: Final = (
    *(ONE, "three segments, wandering mix", SMALL, "only a 10% segment falls, wandering mix"),
    *("Simpson: every segment falls, the aggregate rises", SESSIONS),
)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def medians(section: str, column: str, scenario: str) -> str:
    """Of the three drops, as the guides write them: 129 / 41 / 14."""
    text = TABLE.partition(f"\n## {section}")[2].partition("\n## ")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    found = {row[1]: row[head.index(column)].partition(" / ")[0] for row in rows if row[0] == scenario}
    return " / ".join(found[drop] for drop in DROPS)


def usual(scenario: str, column: str = "DriftGuard") -> str:
    return medians("Delay at A = 100,000", column, scenario)


def at_equal_rate(scenario: str) -> str:
    return medians("All at the same realised rate", "DriftGuard", scenario)


def test_the_readme_and_the_advice_on_tuning_quote_the_table() -> None:
    assert f"after {usual(ONE)} requests" in page("README.md")
    tuning = re.sub(r"\s+", " ", page("docs/tuning.md"))
    assert f"{usual(ONE)} requests at A = 100,000 and {at_equal_rate(ONE)} at one false alarm" in tuning
    assert f"{usual(SMALL)} requests of the whole stream" in tuning
    assert f"{usual(SESSIONS)} requests where they are named" in tuning


def test_the_tables_of_the_guides_quote_the_table() -> None:
    detection, measured = page("docs/detection.md"), page("docs/measured.md")
    for scenario in (ONE, "three segments, wandering mix", SMALL, SESSIONS):
        assert f" | {usual(scenario)} | {at_equal_rate(scenario)} |" in detection, scenario
    for scenario in QUOTED:
        row = f" | {usual(scenario)} | {usual(scenario, 'oracle')} | {at_equal_rate(scenario)} | "
        assert row in measured, scenario
