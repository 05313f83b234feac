"""The direct sink and a cluster of two Alertmanagers: both are posted to, one of them pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import httpx
import pytest
import yaml

from driftguard.alerting.alertmanager import Alertmanager
from driftguard.alerting.destination import alertmanagers
from driftguard.alerting.places import Places
from driftguard.demo.processes import free_port
from driftguard.metrics import Metrics
from driftguard.store.database import Database
from tests.alerting.http_receiver import Receiver, http_receiver, wait_until
from tests.alerting.incident_rows import add_incident, add_stream, resolve
from tests.integration.servers import needs_alertmanager, running_alertmanager


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


@pytest.mark.slow
@needs_alertmanager
def test_a_cluster_that_was_away_pages_once_and_resolves_once(database: Database, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    sinks = [Alertmanager(database, url, Places("http://sidecar"), Metrics()) for url in urls]

    def send() -> None:
        for sink in sinks:
            sink.send(datetime.now(UTC))

    first = str(add_incident(database, alertmanagers(urls)))
    send()  # nobody is there

    with http_receiver() as pager, cluster(tmp_path, _config(pager.url), ports):
        send()
        wait_until(lambda: len(_told(pager)) >= 1, "the page")
        _both_consider(tmp_path, ports)
        assert _told(pager) == [(first, "firing")]

        resolve(database, UUID(first))
        second = str(add_incident(database, alertmanagers(urls), stream_id=add_stream(database, "v2")))
        send()
        wait_until(lambda: len(_told(pager)) >= 3, "the resolution, and the next page")
        _both_consider(tmp_path, ports)
        assert sorted(_told(pager)[1:]) == sorted([(first, "resolved"), (second, "firing")])


def _config(pager: str) -> str:
    """One group of all alerts: it is considered again and again as long as one of them fires. As in practice,
    not so often that an Alertmanager which waits for the other meanwhile decides on what is outdated."""
    route = {"receiver": "pager", "group_by": ["alertname"], "group_wait": "0s", "group_interval": "3s"}
    receivers = [{"name": "pager", "webhook_configs": [{"url": pager}]}]
    return yaml.safe_dump({"route": route, "receivers": receivers})


def _told(pager: Receiver) -> list[tuple[str, str]]:
    """(incident, status) of every alert in every message."""
    return [
        (alert["labels"]["incident"], alert["status"])
        for item in pager.taken()
        for alert in item.body["alerts"]
    ]


def _both_consider(directory: Path, ports: Sequence[int]) -> None:
    """Until each has begun twice more to consider the group. It is considered by one at a time, so the first
    of the two began after what was sent last, and is over."""
    before = [_considered(directory, port) for port in ports]
    wait_until(
        lambda: all(
            _considered(directory, port) >= count + 2 for port, count in zip(ports, before, strict=True)
        ),
        "both to have considered what was sent",
    )


def _considered(directory: Path, port: int) -> int:
    return (directory / str(port) / "alertmanager.log").read_text().count("msg=flushing")
