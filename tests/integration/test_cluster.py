"""The direct sink and a cluster of two Alertmanagers: both are posted to, one of them pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import yaml

from driftguard.alerting.alertmanager import AlertmanagerSink, destinations
from driftguard.metrics import Metrics
from driftguard.store.database import Database
from tests.alerting.http_receiver import http_receiver, wait_until
from tests.alerting.incident_rows import add_incident, resolve
from tests.integration.servers import free_port, needs_alertmanager, running_alertmanager


@contextmanager
def cluster(directory: Path, config: str, ports: list[int]) -> Iterator[None]:
    gossip = [free_port(), free_port()]
    with ExitStack() as stack:
        for place, port in enumerate(ports):
            (directory / str(port)).mkdir()
            peers = [gossip[place], gossip[1 - place]]
            stack.enter_context(running_alertmanager(directory / str(port), config, port=port, peers=peers))
        wait_until(lambda: all(_peers(port) == 2 for port in ports), "the cluster to find itself")
        yield


def _peers(port: int) -> int:
    status = httpx.get(f"http://127.0.0.1:{port}/api/v2/status").json()["cluster"]
    return len(status["peers"]) if status["status"] == "ready" else 0


@needs_alertmanager
def test_a_cluster_that_was_away_pages_once_and_resolves_once(database: Database, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    incident_id = add_incident(database, destinations(urls))
    sink = AlertmanagerSink(database, urls, "http://sidecar", Metrics())
    sink.send(datetime.now(UTC))  # nobody is there

    with http_receiver() as pager:
        route = {"receiver": "pager", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
        receivers = [{"name": "pager", "webhook_configs": [{"url": pager.url}]}]
        config = yaml.safe_dump({"route": route, "receivers": receivers})
        with cluster(tmp_path, config, ports):
            _both_consider(ports, lambda: sink.send(datetime.now(UTC)))
            assert [item.body["status"] for item in pager.taken()] == ["firing"]
            resolve(database, incident_id)
            _both_consider(ports, lambda: sink.send(datetime.now(UTC)))
            assert [item.body["status"] for item in pager.taken()] == ["firing", "resolved"]


def _both_consider(ports: Sequence[int], act: Callable[[], None]) -> None:
    before = [_flushes(port) for port in ports]
    act()
    # Twice, because one may have been under way already.
    wait_until(
        lambda: all(_flushes(port) > count + 1 for port, count in zip(ports, before, strict=True)),
        "both to have considered what was sent",
    )


def _flushes(port: int) -> int:
    """How often this Alertmanager has considered a group of alerts to its end, telling somebody or not."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    name = "alertmanager_dispatcher_aggregation_group_processing_duration_seconds_count"
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
