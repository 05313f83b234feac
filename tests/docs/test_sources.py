"""docs/sources.md agrees with the code: engines, conditions, settings."""

from __future__ import annotations

import re
from pathlib import Path

from driftguard.adapters.condition import CONDITIONS
from driftguard.adapters.kinds import ADAPTERS
from driftguard.settings.loading import load_settings
from driftguard.sources.source import sources_of

PAGE = (Path(__file__).parents[2] / "docs" / "sources.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def first_cells(heading: str) -> list[str]:
    """Of the rows of the table that begins with this heading."""
    rows = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1].strip() for row in rows]


def test_every_engine_is_listed_with_its_fidelity() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if re.match(r"\| .* \| `\w+` \|", line)]
    told = {row[2].strip(" `"): row[4].strip().partition(";")[0] for row in rows}
    assert told == {kind: adapter.fidelity for kind, adapter in ADAPTERS.items()}


def test_every_condition_is_listed() -> None:
    listed = re.findall(r"`(\w+)`", " ".join(first_cells("condition")))
    assert sorted(listed) == sorted(CONDITIONS)


def test_the_settings_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "driftguard.toml"
    path.write_text(block("toml"))
    settings = load_settings(path)
    assert [source.identity.server for source in sources_of(settings.sources)] == [
        "chat-eu-1",
        "code-1",
        "small",
    ]
