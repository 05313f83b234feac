"""The committed JSON is what the code generates, and its layout and links hold together."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from dashboards import frame, generate, words
from driftguard.adapters.condition import CONDITIONS
from driftguard.incident_lifecycle import Severity
from driftguard.metrics.labels import RUN_OUTCOMES, VERDICTS
from driftguard.records.documents.diagnosis import Cause
from driftguard.status.verdict import WORST_FIRST
from driftguard.store.drafts import DraftState
from driftguard.store.retrain_runs import RUNNING_STATES
from tests.dashboards.committed import DASHBOARDS, HERE, every_panel, panels, variables

COLUMNS = 24


def test_the_committed_json_is_what_the_code_generates() -> None:
    made = generate.files()
    committed = {path.name: path.read_text(encoding="utf-8") for path in HERE.glob("*.json")}
    assert made.keys() == committed.keys()
    differing = [name for name in made if made[name] != committed[name]]
    assert not differing, f"run `make dashboards`: {', '.join(differing)} is not what the code generates"


def test_every_dashboard_keeps_its_address() -> None:
    assert {uid: dashboard["uid"] for uid, dashboard in DASHBOARDS.items()} == {
        uid: uid
        for uid in ("driftguard-engine", "driftguard-fleet", "driftguard-retraining", "driftguard-stream")
    }


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_panels_fill_the_width_without_gaps_or_overlaps(uid: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARDS[uid]["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
    height = max(y for _, y in taken) + 1
    gaps = [(x, y) for x in range(COLUMNS) for y in range(height) if (x, y) not in taken]
    assert not gaps, f"nothing lies at (column, line) {gaps[:3]}"
    assert len(taken) == COLUMNS * height, "something lies beyond column 24"


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_rows_have_names_and_numbers_are_not_used_twice(uid: str) -> None:
    everything = DASHBOARDS[uid]["panels"]
    rows = [panel["title"] for panel in everything if panel["type"] == "row"]
    assert everything[0]["type"] == "row"
    assert all(rows)
    assert len(set(rows)) == len(rows)
    ids = [panel["id"] for panel in everything]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("told", "states"),
    [
        (words.VERDICTS, VERDICTS),
        (words.CONDITIONS, CONDITIONS),
        (words.SEVERITIES, get_args(Severity)),
        (words.CAUSES, get_args(Cause)),
        (words.STAGES, RUNNING_STATES),
        (words.OUTCOMES, RUN_OUTCOMES),
        (words.DRAFT_STATES, get_args(DraftState)),
    ],
)
def test_every_state_that_the_sidecar_exports_has_a_word(told: words.Words, states: tuple[str, ...]) -> None:
    assert sorted(told) == sorted(states)
    assert len({word for word, _ in told.values()}) == len(told)


def test_the_worst_first_is_the_same_here_as_on_the_status_page() -> None:
    assert tuple(words.VERDICTS) == WORST_FIRST


def links(uid: str) -> list[tuple[dict[str, Any], str]]:
    """(the panel that has it, or nothing; address) of every link on a dashboard."""
    dashboard = DASHBOARDS[uid]
    found: list[tuple[dict[str, Any], str]] = [({}, link["url"]) for link in dashboard["links"]]
    for panel in panels(dashboard):
        for override in panel["fieldConfig"]["overrides"]:
            for item in override["properties"]:
                if item["id"] == "links":
                    found += [(panel, link["url"]) for link in item["value"]]
    return found


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_links_lead_to_dashboards_and_variables_that_exist(uid: str) -> None:
    reached = set()
    for _, url in links(uid):
        for name in re.findall(r"\$\{(\w+):\w+\}", url):
            assert name in variables(uid), f"{url}: there is no variable {name} here"
        if match := re.match(r"/d/([\w-]+)\?", url):
            reached.add(match[1])
            carried = re.findall(r"\$\{(\w+):queryparam\}|var-(\w+)=", url)
            for name in (first or second for first, second in carried):
                assert name in variables(match[1]), f"{url}: {match[1]} has no variable {name}"
        else:
            assert url.startswith("${sidecar:raw}"), url
    assert reached | {uid} == DASHBOARDS.keys()
    assert "${sidecar:raw}" in {url for _, url in links(uid)}


def test_links_of_rows_use_columns_that_their_table_has() -> None:
    found = [(panel, url) for uid in DASHBOARDS for panel, url in links(uid) if "__data.fields" in url]
    assert found
    for panel, url in found:
        (organize,) = [item for item in panel["transformations"] if item["id"] == "organize"]
        for name in re.findall(r"__data\.fields\.(\w+)", url):
            assert name in organize["options"]["renameByName"], f"{panel['title']}: {name}"


def test_what_is_set_by_name_is_set_for_a_column_or_series_of_that_name() -> None:
    """A column that was renamed would lose its unit and colour without a word."""
    for uid, panel in every_panel():
        if panel["type"] != "table":
            continue
        (organize,) = [item for item in panel["transformations"] if item["id"] == "organize"]
        columns = set(organize["options"]["renameByName"].values())
        for override in panel["fieldConfig"]["overrides"]:
            if override["matcher"]["id"] == "byName":
                assert override["matcher"]["options"] in columns, f"{uid}: {panel['title']}"


def test_a_panel_without_data_says_why_and_a_cell_without_a_number_does_not() -> None:
    for uid, panel in every_panel():
        assert panel["fieldConfig"]["defaults"]["noValue"], f"{uid}: {panel['title']}"
        if panel["type"] == "table":
            (of_cells,) = [
                setting["value"]
                for override in panel["fieldConfig"]["overrides"]
                for setting in override["properties"]
                if setting["id"] == "noValue"
            ]
            assert of_cells == "–"


def test_the_address_of_the_status_page_is_the_sidecars_own() -> None:
    from driftguard.settings import Settings

    settings = Settings()
    assert f"http://{settings.host}:{settings.port}" == frame.STATUS_PAGE
