"""Tables of the report."""

from __future__ import annotations

from collections.abc import Sequence

NOT_YET = "not yet measured"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown. No rows: says so."""
    if not rows:
        return f"{NOT_YET.capitalize()}."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
