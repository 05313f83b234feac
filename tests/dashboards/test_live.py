"""Every query of every dashboard, as Grafana would send it, to a real Prometheus."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.conftest import PATIENCE_SECONDS
from tests.dashboards.committed import (
    DASHBOARDS,
    Query,
    annotation_queries,
    every_panel,
    every_query,
    panel_queries,
    variables,
)
from tests.dashboards.conftest import Fleet

pytestmark = pytest.mark.slow

RANGE_SECONDS = 600  # all that there is, however slow the machine
EVERYTHING = {
    "__interval": "1m",
    "__rate_interval": "5m",
    "__range": f"{RANGE_SECONDS}s",
    "server": "chat",
    "target": "target",
}
# What the live sidecar with its incident cannot show: it scrapes nobody, nobody is notified, no draft was
# retrained, and no request without speculation was timed. The engine is another process.
NOT_DRIFTED = {
    ("driftguard-fleet", "Condition of the scraped servers"),
    ("driftguard-fleet", "Time since the last good scrape"),
    ("driftguard-fleet", "Scrapes"),
    ("driftguard-fleet", "Attempts to notify"),
    ("driftguard-stream", "Acceptance rate against the baseline"),  # no break-even in it
    ("driftguard-stream", "Gain of speculation"),
    ("driftguard-stream", "K in use and the best K"),  # the best is not known
    ("driftguard-stream", "Condition at the newest scrape"),
    ("driftguard-stream", "Time since the last good scrape"),
    ("driftguard-stream", "Age of the draft in service"),
    ("driftguard-stream", "Answered and not recorded"),
}
NOT_MARKED = {
    ("driftguard-fleet", "Drafts put into service"),
    ("driftguard-stream", "Drafts put into service"),
}


def ask(fleet: Fleet, query: Query, instance: str = ".+") -> list[dict[str, Any]]:
    """Series with at least one number in the time shown (an instant query: now)."""
    values = dict.fromkeys(variables(query.dashboard), ".+") | EVERYTHING | {"instance": instance}
    expression = filled(query.expression, values)
    now = time.time()
    if query.instant:
        series = fleet.prometheus.query(expression)
        return [item for item in series if math.isfinite(float(item["value"][1]))]
    answer = httpx.get(
        f"{fleet.prometheus.url}/api/v1/query_range",
        params={"query": expression, "start": now - RANGE_SECONDS, "end": now, "step": 1},
    )
    assert answer.status_code == 200, f"{query}: {answer.text}"
    series = answer.json()["data"]["result"]
    return [item for item in series if any(math.isfinite(float(value)) for _, value in item["values"])]


def filled(expression: str, values: dict[str, str]) -> str:
    """As Grafana does it; an unknown variable is an error here and text there."""
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expression)


def eventually(look: Callable[[], object], expected: object) -> None:
    """With the next scrape, where the newest took too long, or something is not told yet."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := look()) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found == expected


def numbers(fleet: Fleet, query: Query, instance: str) -> list[float]:
    """Of an instant query."""
    return [float(series["value"][1]) for series in ask(fleet, query, instance)]


def test_every_query_has_data(fleet: Fleet) -> None:
    eventually(lambda: [str(query) for query in every_query() if not ask(fleet, query)], [])


def test_the_live_sidecar_shows_its_own_share(fleet: Fleet) -> None:
    """Without what tests filled: every query of Fleet and Stream, but for the panels named above."""
    instance = re.escape(fleet.drifted).replace("\\", "\\\\")
    own = [query for query in every_query() if query.dashboard in ("driftguard-fleet", "driftguard-stream")]
    eventually(
        lambda: {(query.dashboard, query.panel) for query in own if not ask(fleet, query, instance)},
        NOT_DRIFTED | NOT_MARKED,
    )


def test_names_of_series_use_labels_that_they_have(fleet: Fleet) -> None:
    for query in every_query():
        wanted = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        for series in ask(fleet, query):
            assert wanted <= series["metric"].keys(), query


def test_queries_of_a_table_have_the_labels_of_its_columns(fleet: Fleet) -> None:
    """Else their rows would not be merged into one."""
    tables = [(uid, panel) for uid, panel in every_panel() if panel["type"] == "table"]
    assert tables
    for uid, panel in tables:
        (organize,) = [item for item in panel["transformations"] if item["id"] == "organize"]
        labels = {name for name in organize["options"]["renameByName"] if not name.startswith("Value")}
        for query in panel_queries(uid, panel):
            for series in ask(fleet, query):
                assert series["metric"].keys() == labels, query


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_every_variable_offers_something(fleet: Fleet, uid: str) -> None:
    values = dict.fromkeys(variables(uid), ".+") | EVERYTHING
    for variable in variables(uid).values():
        if variable["type"] != "query":
            continue
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert match
        answer = httpx.get(
            f"{fleet.prometheus.url}/api/v1/label/{match[2]}/values",
            params={"match[]": filled(match[1], values)},
        )
        assert answer.json()["data"], variable["query"]


def test_the_worst_stream_comes_first(fleet: Fleet) -> None:
    (panel,) = [item for _, item in every_panel() if item["title"] == "Every stream, the worst first"]
    assert panel["options"]["sortBy"] == [{"displayName": "Verdict", "desc": False}]
    ranks = panel_queries("driftguard-fleet", panel)[0]
    instances = [re.escape(name).replace("\\", "\\\\") for name in (fleet.drifted, fleet.mended)]
    eventually(lambda: [numbers(fleet, ranks, instance) for instance in instances], [[1], [9]])


def test_marks_lie_where_it_happened(fleet: Fleet) -> None:
    """Change points and promotions: the value is a time in milliseconds, a few minutes ago."""
    now_ms = 1000 * time.time()
    for query in annotation_queries():
        if not query.expression.startswith("1000 * "):
            continue
        for series in ask(fleet, query):
            at_ms = float(series["values"][-1][1])
            assert now_ms - 30 * 60_000 < at_ms <= now_ms, query


def test_the_baseline_is_weighted_with_the_mix_of_today(fleet: Fleet) -> None:
    """Three segments with as much traffic each: the baseline is the mean of theirs, .75, .70 and .70."""
    drifted = re.escape(fleet.drifted).replace("\\", "\\\\")
    panel = next(
        item for uid, item in every_panel() if (uid, item["title"]) == ("driftguard-stream", "Baseline")
    )
    (query,) = panel_queries("driftguard-stream", panel)
    mean = (0.75 + 0.70 + 0.70) / 3
    eventually(lambda: numbers(fleet, query, drifted), [pytest.approx(mean, abs=0.03)])
