"""What queries of the committed dashboards answer, by promtool, where a sidecar is lost or replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.alerts.committed import needs_promtool, promtool
from tests.dashboards.committed import every_panel, panel_queries

pytestmark = needs_promtool

STREAM = 'server="chat",target="llama",draft_version="v1",method="eagle3"'
FILLED = {"__interval": "1m", "__rate_interval": "2m", "__range": "60m"}  # every other variable: all there is


def query(dashboard: str, panel: str) -> str:
    """The first of a panel, with its variables filled in."""
    (found,) = [
        panel_queries(uid, each)[0]
        for uid, each in every_panel()
        if (uid, each["title"]) == (dashboard, panel)
    ]
    return re.sub(r"\$(\w+)", lambda match: FILLED.get(match[1], ".+"), found.expression)


def series(name: str, instance: str, labels: str, values: str) -> dict[str, str]:
    """Minute by minute."""
    return {"series": f'{name}{{job="driftguard",instance="{instance}",{labels}}}', "values": values}


def check(directory: Path, found: list[dict[str, str]], expression: str, at: str, expected: str) -> None:
    """`expected`: value and labels of the only sample."""
    value, _, labels = expected.partition(" ")
    samples = [{"labels": labels, "value": float(value)}]
    case = {"expr": expression, "eval_time": at, "exp_samples": samples}
    test = {"interval": "1m", "input_series": found, "promql_expr_test": [case]}
    file = directory / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [test]}), encoding="utf-8")
    promtool("test", "rules", file)


@pytest.mark.parametrize(
    ("panel", "expected"),
    [("Streams in service", "2 {}"), ("Degraded streams", "0 {}"), ("Servers that fail", "1 {}")],
)
def test_what_a_sidecar_without_its_database_showed_last_is_left_out_beside_one_that_has_it(
    tmp_path: Path, panel: str, expected: str
) -> None:
    refreshed, source = "driftguard_gauges_last_refresh_timestamp_seconds", 'source="vllm-1",kind="vllm"'
    found = [
        series(refreshed, "a", "", "0+60x10 600x20"),
        series(refreshed, "b", "", "0+60x30"),
        series("driftguard_streams", "a", 'verdict="degraded"', "1x30"),
        series("driftguard_streams", "b", 'verdict="degraded"', "1x10 0x20"),
        series("driftguard_streams", "a", 'verdict="steady"', "1x30"),
        series("driftguard_streams", "b", 'verdict="steady"', "1x10 2x20"),
        series("driftguard_source_condition", "a", f'{source},condition="unreadable"', "1x30"),
        series("driftguard_source_condition", "b", f'{source},condition="unreachable"', "_x11 1x19"),
    ]
    check(tmp_path, found, query("driftguard-fleet", panel), "20m", expected)


def test_a_chart_shows_what_was_there_and_first_what_is_there_at_the_end_of_the_time_shown(
    tmp_path: Path,
) -> None:
    """At minute 20 of an hour."""
    drawn = query("driftguard-fleet", "Verdicts over time").replace("@ end()", "@ 3600")
    drawn = f"last_over_time(({drawn})[1m:1m] offset 40m)"
    steady, degraded = (STREAM + f',verdict="{verdict}"' for verdict in ("steady", "degraded"))
    dead = series("driftguard_stream_verdict", "a", steady, "1x30")
    check(tmp_path, [dead], drawn, "60m", f"10 {{{STREAM}}}")
    gone = [
        series("driftguard_stream_verdict", "a", degraded.replace("chat", f"old-{number}"), "1x30")
        for number in range(30)
    ]
    there = series("driftguard_stream_verdict", "a", steady, "1x60")
    check(tmp_path, [*gone, there], f"sum({drawn} > 1)", "60m", "10 {}")


def test_the_age_of_the_gauges_is_that_of_the_gauges(tmp_path: Path) -> None:
    found = [
        series("driftguard_detector_last_round_timestamp_seconds", "a", "", "0+60x20"),
        series("driftguard_gauges_last_refresh_timestamp_seconds", "a", "", "0+60x10 600x10"),
    ]
    expression = query("driftguard-fleet", "Time since the gauges were set")
    check(tmp_path, found, expression, "20m", '600 {instance="a"}')


def test_a_process_that_has_not_set_its_gauges_yet_is_not_decades_old(tmp_path: Path) -> None:
    """It exports 0 until then, and all other ages of the chart would lie on its axis."""
    found = [
        series("driftguard_gauges_last_refresh_timestamp_seconds", "a", "", "0x20"),
        series("driftguard_gauges_last_refresh_timestamp_seconds", "b", "", "60+60x20"),
    ]
    expression = query("driftguard-fleet", "Time since the gauges were set")
    check(tmp_path, found, expression, "20m", '-60 {instance="b"}')


@pytest.mark.parametrize("panel", ["Rollbacks", "Ended runs"])
def test_runs_that_ended_are_counted_through_a_change_of_the_address(tmp_path: Path, panel: str) -> None:
    """The new process begins with the number in the database."""
    labels = 'server="chat",target="llama",outcome="rolled_back"'
    found = [
        series("driftguard_retrain_runs_total", "a", labels, "0x10 1x10 2x5 3x5 stale"),
        series("driftguard_retrain_runs_total", "b", labels, "_x32 3x5 4x5 5x10"),
    ]
    expression = (
        query("driftguard-retraining", panel).replace("[2m]", "[60m]").replace("offset 1m", "offset 50m")
    )
    check(tmp_path, found, expression, "50m", '5 {outcome="rolled_back"}')


def test_a_run_that_ended_is_one_bar(tmp_path: Path) -> None:
    """The range of the query reaches over several of a chart's steps, which are a minute apart."""
    labels = 'server="chat",target="llama",outcome="promoted"'
    found = [series("driftguard_retrain_runs_total", "a", labels, "3x10 4x20")]
    bars = f"sum_over_time(({query('driftguard-retraining', 'Ended runs')})[25m:1m])"
    check(tmp_path, found, bars, "30m", '1 {outcome="promoted"}')


@pytest.mark.parametrize(
    ("dashboard", "panel", "expected"),
    [
        ("driftguard-fleet", "Streams in service", "7 {}"),
        ("driftguard-fleet", "Degraded streams", "3 {}"),
        ("driftguard-fleet", "Streams by verdict", '3 {verdict="degraded"}'),
        ("driftguard-fleet", "Open incidents over time", '3 {severity="warning"}'),
        ("driftguard-fleet", "Undelivered", "3 {}"),
        ("driftguard-fleet", "Undelivered notifications", "3 {}"),
        ("driftguard-fleet", "Servers that fail", "2 {}"),
        ("driftguard-retraining", "Known drafts", '3 {state="candidate"}'),
        ("driftguard-retraining", "Rollbacks", '1 {outcome="rolled_back"}'),
    ],
)
def test_what_clusters_have_adds_up_and_what_sidecars_of_one_database_show_does_not(
    tmp_path: Path, dashboard: str, panel: str, expected: str
) -> None:
    """Also where the servers of both have the same names."""
    place, source = 'server="engine",target="llama"', 'source="chat-0",kind="vllm",condition="unreachable"'
    found = []
    for cluster, instance, number in (("eu", "a", 1), ("eu", "b", 1), ("us", "c", 2)):
        shown = {
            ("driftguard_gauges_last_refresh_timestamp_seconds", ""): "0+60x30",
            ("driftguard_streams", 'verdict="degraded"'): f"{number}x30",
            ("driftguard_incidents_open", 'severity="warning",direction="down"'): f"{number}x30",
            ("driftguard_notifications_undelivered", ""): f"{number}x30",
            ("driftguard_source_condition", source): "1x30",
            ("driftguard_drafts", f'{place},state="candidate"'): f"{number}x30",
            ("driftguard_retrain_runs_total", f'{place},outcome="rolled_back"'): (
                "40x30" if cluster == "eu" else "3x20 4x10"
            ),
        }
        if panel == "Streams in service":
            shown["driftguard_streams", 'verdict="steady"'] = "2x30"
        found += [
            series(name, instance, f'cluster="{cluster}",{labels}', values)
            for (name, labels), values in shown.items()
        ]
    check(tmp_path, found, query(dashboard, panel), "30m", expected)
