"""The rules of github.com/grafana/dashboard-linter, and the project's own, on the committed JSON.

Not taken over: the rules for Loki, which is not used. Instead of "a panel with value mappings needs no unit"
every panel has one.
"""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry

from driftguard.metrics import Metrics
from tests.dashboards.committed import (
    DASHBOARDS,
    annotation_queries,
    every_panel,
    every_query,
    panel_queries,
    selectors,
    variables,
)
from tests.dashboards.fed import ServingEngine

UNITS = {"none", "short", "percentunit", "s", "bytes", "cps", "reqps", "ops"}  # all of Grafana's
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_the_data_source_is_a_variable(uid: str) -> None:
    variable = variables(uid)["datasource"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    assert variable["label"] == "Data source"
    assert "__inputs" not in DASHBOARDS[uid]  # provisioning ignores those


@pytest.mark.parametrize("uid", DASHBOARDS)
@pytest.mark.parametrize("name", ["job", "instance"])
def test_job_and_instance_are_variables(uid: str, name: str) -> None:
    variable = variables(uid)[name]
    assert (variable["type"], variable["datasource"]) == ("query", SOURCE)
    assert variable["label"] == name.capitalize()
    assert variable["multi"]
    assert variable["includeAll"]
    assert variable["allValue"] == ".+"


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_variables_follow_the_time_range_and_are_explained(uid: str) -> None:
    for variable in variables(uid).values():
        assert variable["description"]
        assert variable["label"]
        if variable["type"] == "query":
            assert variable["refresh"] == 2
            assert re.fullmatch(r"label_values\(.+, \w+\)", variable["query"])


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_a_dashboard_is_not_editable_and_says_what_it_is_for(uid: str) -> None:
    dashboard = DASHBOARDS[uid]
    assert dashboard["editable"] is False
    assert dashboard["description"]
    assert dashboard["tags"] == ["driftguard"]


def test_a_panel_has_title_description_unit_queries_and_the_data_source() -> None:
    for uid, panel in every_panel():
        assert panel["title"], uid
        where = f"{uid}: {panel['title']}"
        assert panel["description"].endswith("."), where
        assert panel["datasource"] == SOURCE, where
        assert panel["targets"], where
        assert all(target["datasource"] == SOURCE for target in panel["targets"]), where
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, where


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_titles_are_not_used_twice_in_a_row(uid: str) -> None:
    titles: list[str] = []
    for panel in DASHBOARDS[uid]["panels"]:
        if panel["type"] == "row":
            titles = []
        assert panel["title"] not in titles
        titles.append(panel["title"])


def test_every_selector_asks_for_job_and_instance() -> None:
    for query in every_query():
        found = selectors(query.expression)
        assert found, query
        for selector in found:
            assert {'job=~"$job"', 'instance=~"$instance"'} <= set(selector.matchers), query


def test_counters_are_rates_over_the_rate_interval() -> None:
    """What follows the database may rise over the whole time range; everything else that has a range has
    Grafana's."""
    for query in every_query():
        for selector in selectors(query.expression):
            is_counter = selector.name.endswith(("_total", "_bucket", "_sum", "_count"))
            follows = selector.name == "driftguard_retrain_runs_total"
            functions = ("max_over_time", "min_over_time") if follows else ("rate",)
            assert is_counter == (selector.function in functions), query
            assert (selector.range is not None) == is_counter, query
            if is_counter:
                whole = follows and selector.range == "[$__range]"
                assert whole or selector.range == "[$__rate_interval]", query


def test_ratios_are_ratios_of_sums_and_quantiles_are_over_buckets() -> None:
    for query in every_query():
        assert "avg" not in query.expression, query
        for match in re.finditer(r"histogram_quantile\([\d.]+, (.{16})", query.expression):
            assert match[1].startswith("sum by (le"), query
        for selector in selectors(query.expression):
            if selector.function == "rate":
                before = query.expression.partition(selector.name)[0]
                assert re.search(r"sum( by \([\w, ]+\) )?\(rate\($", before), query


def sample_names(registry: CollectorRegistry) -> set[str]:
    """As they are scraped, of metrics without samples too."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {
        f"{family.name}{suffix}"
        for family in registry.collect()
        for suffix in suffixes.get(family.type, ("_info",) if family.type == "info" else ("",))
    }


def test_every_metric_is_declared() -> None:
    declared = sample_names(Metrics().registry) | sample_names(ServingEngine().metrics._registry)
    asked = {selector.name for query in every_query() for selector in selectors(query.expression)}
    asked |= {
        selector.name
        for uid in DASHBOARDS
        for variable in variables(uid).values()
        if variable["type"] == "query"
        for selector in selectors(variable["query"])
    }
    assert asked <= declared, asked - declared


def test_no_metric_is_written_without_braces() -> None:
    """So that the tests above have seen every selector of it."""
    for query in every_query():
        for name in re.findall(r"\b(?:driftguard|process)_\w+", query.expression):
            assert f"{name}{{" in query.expression, query


def test_an_annotation_whose_value_is_its_time_is_in_milliseconds() -> None:
    for query in annotation_queries():
        (item,) = [
            item for item in DASHBOARDS[query.dashboard]["annotations"]["list"] if item["name"] == query.panel
        ]
        assert item["datasource"] == SOURCE
        assert item["useValueForTime"] == query.expression.startswith("1000 * ")


def test_marks_are_on_the_dashboards_that_need_them() -> None:
    names = {
        uid: {item["name"] for item in dashboard["annotations"]["list"]}
        for uid, dashboard in DASHBOARDS.items()
    }
    both = {"Change points", "Drafts put into service"}
    assert both <= names["driftguard-fleet"]
    assert both | {"Incidents"} <= names["driftguard-stream"]
    assert both <= names["driftguard-retraining"]


def test_each_query_of_a_panel_has_a_letter_of_its_own() -> None:
    for _, panel in every_panel():
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        assert len(panel_queries("", panel)) == len(letters)
