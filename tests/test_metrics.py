"""What Prometheus sees: names, bounded labels, one verdict per stream, and promtool's opinion."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from driftguard.metrics import Metrics
from driftguard.records import StreamKey
from driftguard.store import database
from driftguard.store.database import Work

STREAM = StreamKey("chat", "target", "v1", "draft_model")
LABELS = {"server": "chat", "target": "target", "draft_version": "v1", "method": "draft_model"}


@dataclass(slots=True)
class Counts:
    records: int = 2
    steps: int = 30
    drafted: int = 120
    accepted: int = 80
    emitted: int = 110
    positions: dict[int, tuple[int, int]] = field(default_factory=lambda: {1: (30, 26), 2: (30, 20)})


def filled() -> Metrics:
    metrics = Metrics()
    metrics.traffic.count(STREAM, "german", "request", Counts())
    metrics.incidents.set_open([("critical", "down", 1)])
    metrics.ingest.records.labels("accepted").inc()
    metrics.notifications.attempts.labels("webhook", "firing", "delivered").inc()
    metrics.retraining.runs.labels("chat", "target", "promoted").inc()
    metrics.sources.observe("chat", "vllm", "reporting", datetime(2026, 11, 1, tzinfo=UTC))
    return metrics


def test_acceptance_is_a_ratio_of_two_counters_with_the_same_labels() -> None:
    registry = filled().registry
    labels = {**LABELS, "segment": "german", "kind": "request"}
    assert registry.get_sample_value("driftguard_accepted_tokens_total", labels) == 80
    assert registry.get_sample_value("driftguard_draft_tokens_total", labels) == 120
    assert registry.get_sample_value("driftguard_emitted_tokens_total", labels) == 110
    assert registry.get_sample_value("driftguard_steps_total", labels) == 30
    assert registry.get_sample_value("driftguard_records_total", labels) == 2
    second = {**LABELS, "kind": "request", "position": "2"}
    assert registry.get_sample_value("driftguard_draft_tokens_per_position_total", second) == 30
    assert registry.get_sample_value("driftguard_accepted_tokens_per_position_total", second) == 20


def test_streams_beyond_the_limit_are_counted_together_and_the_first_keep_their_counters() -> None:
    metrics = Metrics(max_streams=2)
    for _ in range(2):
        for server in ("a", "b", "c", "d"):
            metrics.traffic.count(StreamKey(server, "target", "v1", "none"), "german", "request", Counts())
    counted = {
        sample.labels["server"]: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "driftguard_records_total"
    }
    assert counted == {"a": 4, "b": 4, "OTHER": 8}
    left_out = metrics.registry.get_sample_value(
        "driftguard_metrics_streams_left_out", {"series": "counters"}
    )
    assert left_out == 2


@pytest.mark.parametrize("destination", ["alertmanager", "webhook"])
def test_the_first_page_of_its_kind_is_an_increase(destination: str) -> None:
    labels = {"destination": destination, "event": "firing", "outcome": "failed"}
    assert Metrics().registry.get_sample_value("driftguard_notifications_total", labels) == 0


@pytest.mark.parametrize("outcome", ["refused", "rejected_queue_full"])
def test_the_first_records_that_are_refused_are_an_increase(outcome: str) -> None:
    found = Metrics().registry.get_sample_value("driftguard_ingest_records_total", {"outcome": outcome})
    assert found == 0


def test_the_first_timeout_of_its_kind_is_an_increase() -> None:
    kinds = [kind for kind in vars(database).values() if isinstance(kind, Work) and kind.statement_seconds]
    registry = Metrics().registry
    for kind in kinds:
        for reason in ("statement", "lock", "idle", "silence"):
            labels = {"work": kind.name, "reason": reason}
            assert registry.get_sample_value("driftguard_database_timeouts_total", labels) == 0, labels


def test_an_incident_that_ended_is_no_longer_counted() -> None:
    metrics = filled()
    metrics.incidents.set_open([])
    labels = {"severity": "critical", "direction": "down"}
    assert metrics.registry.get_sample_value("driftguard_incidents_open", labels) == 0


def test_ended_runs_are_counted_once_however_often_they_are_read() -> None:
    metrics = Metrics()
    for total in (2, 2, 3):
        ended = {("chat", "target", "promoted"): (total, datetime(2026, 11, total, tzinfo=UTC))}
        metrics.retraining.set_ended_runs(ended)
    labels = {"server": "chat", "target": "target", "outcome": "promoted"}
    assert metrics.registry.get_sample_value("driftguard_retrain_runs_total", labels) == 3


def test_a_server_that_is_away_keeps_the_time_of_its_last_success() -> None:
    metrics = filled()
    metrics.sources.observe("chat", "vllm", "unreachable", datetime(2026, 11, 2, tzinfo=UTC))
    labels = {"source": "chat", "kind": "vllm"}
    value = metrics.registry.get_sample_value
    assert value("driftguard_source_up", labels) == 0
    assert value("driftguard_source_condition", {**labels, "condition": "reporting"}) is None
    assert value("driftguard_source_condition", {**labels, "condition": "unreachable"}) == 1
    last = value("driftguard_source_last_success_timestamp_seconds", labels)
    assert last == datetime(2026, 11, 1, tzinfo=UTC).timestamp()


def test_a_server_that_turns_out_to_be_of_another_kind_is_shown_once() -> None:
    metrics = Metrics()
    metrics.sources.observe("chat", "unknown", "unreachable", datetime(2026, 11, 1, tzinfo=UTC))
    metrics.sources.observe("chat", "vllm", "reporting", datetime(2026, 11, 1, tzinfo=UTC))
    shown = [line for line in metrics.exposition().decode().splitlines() if 'kind="unknown"' in line]
    assert [line.partition("{")[0] for line in shown] == ["driftguard_source_scrapes_total"]
    assert metrics.registry.get_sample_value("driftguard_source_up", {"source": "chat", "kind": "vllm"}) == 1


def test_there_are_no_created_series() -> None:
    assert not re.search(rb"^driftguard\w+_created", filled().exposition(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say() -> None:
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=filled().exposition(), capture_output=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, b"")
