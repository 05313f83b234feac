"""The dashboards as they are committed, taken apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parents[2] / "dashboards"
DASHBOARDS: Final[dict[str, dict[str, Any]]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("*.json"))
}
_SELECTOR: Final = re.compile(r"(?P<name>[a-z_:][a-z0-9_:]*)\{(?P<matchers>[^}]*)\}(?P<range>\[[^\]]*\])?")


@dataclass(frozen=True, slots=True)
class Selector:
    """One selector of a query, and the function right around it ("" where there is none)."""

    name: str
    matchers: tuple[str, ...]
    range: str | None
    function: str


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel or of an annotation."""

    dashboard: str
    panel: str
    expression: str
    legend: str
    instant: bool

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel}: {self.expression}"


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """All but the rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def every_panel() -> Iterator[tuple[str, dict[str, Any]]]:
    """With the uid of its dashboard."""
    for uid, dashboard in DASHBOARDS.items():
        for panel in panels(dashboard):
            yield uid, panel


def variables(uid: str) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in DASHBOARDS[uid]["templating"]["list"]}


def panel_queries(uid: str, panel: dict[str, Any]) -> list[Query]:
    return [
        Query(
            uid, panel["title"], target["expr"], target.get("legendFormat", ""), target.get("instant", False)
        )
        for target in panel["targets"]
    ]


def annotation_queries() -> list[Query]:
    return [
        Query(uid, item["name"], item["expr"], f"{item['titleFormat']} {item['textFormat']}", False)
        for uid, dashboard in DASHBOARDS.items()
        for item in dashboard["annotations"]["list"]
    ]


def every_query() -> list[Query]:
    found = [query for uid, panel in every_panel() for query in panel_queries(uid, panel)]
    return found + annotation_queries()


def selectors(expression: str) -> list[Selector]:
    """The selectors of an expression; the generator writes all of them with braces."""
    found = []
    for match in _SELECTOR.finditer(expression):
        matchers = tuple(part.strip() for part in match["matchers"].split(","))
        function = re.search(r"(\w+)\($", expression[: match.start()])
        found.append(Selector(match["name"], matchers, match["range"], function[1] if function else ""))
    return found
