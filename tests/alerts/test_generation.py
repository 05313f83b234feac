"""The generated rules: are the committed ones up to date, and do the unit tests hold for other parameters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from driftguard.alerting.rules.generate import rules_file
from driftguard.alerting.rules.parameters import RULE_LABELS, RuleParameters, thresholds
from driftguard.cli.main import app
from driftguard.errors import BadInput
from tests.alerts.committed import (
    COMMITTED,
    RULES,
    RUNBOOKS,
    UNIT_TESTS,
    load,
    needs_promtool,
    promtool,
    rules,
)
from tests.deploy.committed import ROOT, parse_command

DEFAULT = RuleParameters()
# Thresholds between what the unit tests show firing and what they show silent. They leave no room around the
# other two, rejections and maintenance_hours.
OTHER = RuleParameters(
    job_name="monitoring/speculation",
    base_url="https://driftguard.example.com/eu/",
    grafana_url="https://grafana.example.com/",
    extra_labels={"team": 'say "inference"'},
    min_draft_tokens=1_500,
    low_acceptance=0.5,
    retired_days=8,
    unread_seconds=1_000,
    nightly_hours=35,
    unacknowledged_seconds=35,
    detector_seconds=360,
    gauges_seconds=360,
    lag_records=200_000,
    failures=7,
    chore_seconds=700,
)
PAGES = [
    *(ROOT / "README.md", RULES, ROOT / "deploy" / "kubernetes" / "monitoring" / "kustomization.yaml"),
    *sorted((ROOT / "docs").glob("*.md")),
    *RUNBOOKS.values(),
]
IN_NO_CLUSTER = ("absent", "none")  # the problem is that no series is there, so no label of one is


def test_the_committed_rules_are_what_the_defaults_generate() -> None:
    """Differ? make alerts"""
    assert RULES.read_text(encoding="utf-8") == rules_file(COMMITTED)


def test_no_name_or_address_of_the_defaults_stays_behind() -> None:
    text = rules_file(OTHER)
    header, _, body = text.partition("groups:\n")
    addresses = {"https://driftguard.example.com", "https://grafana.example.com"}
    assert set(re.findall(r"https?://[^/\s,]+", body)) == addresses
    assert "//" not in re.sub(r"https://", "", body)
    assert set(re.findall(r'job="([^"]+)"', body)) == {"monitoring/speculation"}
    assert "job_name: monitoring/speculation " in header
    assert "job driftguard" not in body
    assert "named driftguard" not in body


def in_other_words(text: str) -> str:
    """What an annotation says with the other parameters."""
    for old, new in (
        ("http://driftguard:8200", "https://driftguard.example.com/eu"),
        ("http%3A%2F%2Fdriftguard%3A8200", "https%3A%2F%2Fdriftguard.example.com%2Feu"),
        ("http://grafana:3000", "https://grafana.example.com"),
        ("job driftguard ", "job monitoring/speculation "),
        ("named driftguard,", "named monitoring/speculation,"),
        ("below 0.40", "below 0.50"),
        ("After a week", "After 8 days"),
    ):
        text = text.replace(old, new)
    return text


def moved(document: dict[str, Any]) -> dict[str, Any]:
    """A file of unit tests, with the labels and texts that the other parameters give."""

    def series(text: str) -> str:
        text = text.replace('job="driftguard"', 'job="monitoring/speculation"')
        return text if "cluster=" in text else text.replace("{", '{cluster="eu", namespace="llm", ', 1)

    for test in document["tests"]:
        for each in test["input_series"]:
            each["series"] = series(each["series"])
        for case in test.get("promql_expr_test", ()):
            for sample in case["exp_samples"]:
                sample["labels"] = series(sample["labels"])
        for alert in expected(test):
            labels = alert["exp_labels"]
            alert["exp_labels"] = {**labels, "team": 'say "inference"'}
            if labels.get("job") == "driftguard":
                alert["exp_labels"]["job"] = "monitoring/speculation"
            if labels.get("problem") not in IN_NO_CLUSTER:
                alert["exp_labels"] = {"cluster": "eu", "namespace": "llm", **alert["exp_labels"]}
            alert["exp_annotations"] = {
                name: in_other_words(text) for name, text in alert["exp_annotations"].items()
            }
    return document


def expected(test: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each once, also where several times expect the same list."""
    lists = {id(case["exp_alerts"]): case["exp_alerts"] for case in test["alert_rule_test"]}
    for alerts in lists.values():
        yield from alerts


def run_unit_test(directory: Path, parameters: RuleParameters, document: dict[str, Any]) -> None:
    (directory / "rules.yaml").write_text(rules_file(parameters), encoding="utf-8")
    file = directory / "test.yaml"
    file.write_text(yaml.safe_dump({**document, "rule_files": ["rules.yaml"]}), encoding="utf-8")
    promtool("test", "rules", file)


@needs_promtool
def test_promtool_has_nothing_to_say_of_other_parameters(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(rules_file(OTHER), encoding="utf-8")
    promtool("check", "rules", "--lint=all", "--lint-fatal", file)


@needs_promtool
@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_unit_tests_hold_for_other_parameters(file: Path, tmp_path: Path) -> None:
    """Also that every alert keeps the cluster and the namespace of its series."""
    run_unit_test(tmp_path, OTHER, moved(load(file)))


@needs_promtool
def test_servers_of_one_name_in_two_clusters_are_judged_apart(tmp_path: Path) -> None:
    """Together, the one that still sends would hide since when the other one is silent."""
    stream = 'server="chat", target="llama", draft_version="v1", method="eagle3"'
    verdict, arrival = "driftguard_stream_verdict", "driftguard_stream_last_arrival_timestamp_seconds"
    values = {
        f'{verdict}{{cluster="eu", {stream}, verdict="stale"}}': "1x30",
        f'{arrival}{{cluster="eu", {stream}}}': "300x30",
        f'{verdict}{{cluster="us", {stream}, verdict="stale"}}': "0x30",
        f'{arrival}{{cluster="us", {stream}}}': "0+60x30",
    }
    alert = {
        "exp_labels": {
            "cluster": "eu",
            "server": "chat",
            "target": "llama",
            "severity": "warning",
            "problem": "stale",
        },
        "exp_annotations": {
            "status_url": "http://driftguard:8200/?q=chat",
            "runbook_url": "http://driftguard:8200/runbooks/DriftGuardSourceSilent",
            "summary": "No record of chat (llama) has arrived since 1970-01-01 00:05:00 UTC: "
            "a drift there would go unseen",
            "description": "It has been silent for more than three times its usual silence at this time of "
            "day. "
            "After a week without a record a source counts as retired, and this alert ends.",
        },
    }
    case = {"eval_time": "20m", "alertname": "DriftGuardSourceSilent", "exp_alerts": [alert]}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": each} for name, each in values.items()],
        "alert_rule_test": [case],
    }
    run_unit_test(tmp_path, DEFAULT, {"evaluation_interval": "1m", "tests": [test]})


def expressions(parameters: RuleParameters) -> list[tuple[str, str]]:
    """(alert or recorded name, expression) of every rule, in their order."""
    document = yaml.safe_load(rules_file(parameters))
    return [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules(document)]


@pytest.mark.parametrize("threshold", thresholds(), ids=lambda threshold: threshold.name)
def test_a_threshold_changes_the_alerts_that_it_says_it_is_of(threshold: Any) -> None:
    other: dict[str, Any] = {threshold.name: 0.123 if threshold.name == "low_acceptance" else 4_711}
    before, after = expressions(DEFAULT), expressions(RuleParameters(**other))
    differing = [(name, new) for (name, old), (_, new) in zip(before, after, strict=True) if old != new]
    said, _, _ = threshold.metadata["meaning"].partition(":")
    assert {name for name, _ in differing} == {f"DriftGuard{name}" for name in said.split(", ")}
    assert all(str(other[threshold.name]) in expression for _, expression in differing)


def test_every_label_of_an_alert_is_kept_from_being_set() -> None:
    aggregated = " ".join(re.findall(r"(?:by|on) \(([^)]*)\)", rules_file(DEFAULT)))
    used = set(re.findall(r"\w+", aggregated)) | set(re.findall(r"\$labels\.(\w+)", rules_file(DEFAULT)))
    used |= {name for rule in rules(load(RULES)) for name in rule.get("labels", ())}
    assert (used | {"alertname"}) - set(DEFAULT.cluster_labels) <= RULE_LABELS


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"job_name": ""}, "job_name"),
        ({"job_name": 'a"b'}, "job_name"),
        ({"job_name": "{{ $labels.job }}"}, "job_name"),
        ({"base_url": "driftguard.example.com"}, "base_url"),
        ({"base_url": "driftguard:8200"}, "base_url"),
        ({"base_url": "ftp://driftguard.example.com"}, "base_url"),
        ({"base_url": "https://"}, "base_url"),
        ({"base_url": "https://driftguard:eight"}, "base_url"),
        ({"base_url": "https://user:password@driftguard.example.com"}, "base_url"),
        ({"base_url": "https://driftguard.example.com/?a=b"}, "base_url"),
        ({"base_url": "https://driftguard.example.com/ #"}, "base_url"),
        ({"grafana_url": "grafana:3000"}, "grafana_url"),
        ({"cluster_labels": ()}, "cluster_labels: '' is empty"),
        ({"cluster_labels": ("region", "region")}, "cluster_labels: 'region, region' .* names one twice"),
        ({"cluster_labels": ("data-center",)}, "cluster_labels: 'data-center'"),
        ({"cluster_labels": ("",)}, "cluster_labels: ''"),
        ({"cluster_labels": ("server",)}, "cluster_labels: the rules need the label server"),
        ({"extra_labels": {"1st": "a"}}, "extra_labels: '1st'"),
        ({"extra_labels": {"__name__": "a"}}, "extra_labels: '__name__'"),
        ({"extra_labels": {"severity": "critical"}}, "extra_labels: the rules need the label severity"),
        ({"extra_labels": {"team": ""}}, "extra_labels: team=''"),
        ({"extra_labels": {"team": "a\nb"}}, r"extra_labels: team='a\\nb'"),
        ({"extra_labels": {"cluster": "eu"}}, "extra_labels: cluster is a cluster label"),
        ({"low_acceptance": 0}, "low_acceptance: 0 .* at least 0.01 and below 1"),
        ({"low_acceptance": 1.0}, "low_acceptance: 1.0 "),
        ({"low_acceptance": float("nan")}, "low_acceptance: nan "),
        ({"retired_days": 0}, "retired_days: 0 .* at least 1"),
        ({"lag_records": 0.5}, "lag_records: 0.5 is not a whole number"),
        ({"rejections": True}, "rejections: True is not a whole number"),
        ({"failures": -1}, "failures: -1 .* at least 0"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_by_its_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=f"^{named}"):
        RuleParameters(**wrong)


def test_the_command_takes_every_parameter(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    numbers = [
        argument
        for each in thresholds()
        for argument in ("--threshold", f"{each.name}={getattr(OTHER, each.name)}")
    ]
    result = CliRunner().invoke(
        app,
        [
            "alert-rules",
            *("--job-name", OTHER.job_name),
            *("--base-url", OTHER.base_url),
            *("--grafana-url", str(OTHER.grafana_url)),
            *("--cluster-label", "region", "--cluster-label", "cluster"),
            *("--label", 'team=say "inference"'),
            *numbers,
            *("--output", str(file)),
        ],
    )
    assert (result.exit_code, result.output) == (0, "")
    asked = replace(OTHER, cluster_labels=("region", "cluster"))
    assert file.read_text(encoding="utf-8") == rules_file(asked)
    assert "max by (region, cluster, server, target)" in rules_file(asked)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--label", "team"], "--label: 'team' is not NAME=VALUE"),
        (["--label", "team=a", "--label", "team=b"], "--label: team is given twice"),
        (
            ["--threshold", "lag=5"],
            "--threshold: unknown threshold 'lag'; the thresholds are: min_draft_tokens, ",
        ),
        (["--threshold", "lag_records=many"], "--threshold: lag_records=many is not a number"),
        (["--threshold", "lag_records=1.5"], "lag_records: 1.5 is not a whole number"),
        (["--output", "/no/such/directory/rules.yaml"], "--output: /no/such/directory/rules.yaml cannot be"),
    ],
)
def test_the_command_names_what_it_refuses(arguments: list[str], named: str) -> None:
    error = CliRunner().invoke(app, ["alert-rules", *arguments]).exception
    assert isinstance(error, BadInput)
    assert str(error).startswith(named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_says_to_run_is_taken(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for call in re.findall(r"driftguard alert-rules([^`|>\n]*)", text):
        parse_command(["alert-rules", *(each for each in shlex.split(call) if each != "--help")])
    assert not re.search(r"\bsed\b.*(driftguard:8200|rules)", text), "the generator takes the address"
