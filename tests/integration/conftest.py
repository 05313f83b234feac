"""What the tests against real servers share: a sidecar with an open incident, and a Prometheus beside it.

Started once per test process. Tests that share them only read; one that changes something starts its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from sqlalchemy import delete

from driftguard.store.database import Database
from driftguard.store.tables import StreamCost
from tests.alerting.http_receiver import wait_until
from tests.conftest import fresh_database
from tests.integration.committed_config import hastened_rules
from tests.integration.servers import PROMETHEUS, Prometheus, running_prometheus
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic

GOOD = {"code": 0.75, "english": 0.7, "german": 0.7}
BAD = {**GOOD, "german": 0.35}
TIMES = 60.0  # a minute that a rule waits is a second of the test
SCRAPES_OF_TRAFFIC = 3


@pytest.fixture(scope="session")
def drifted_sidecar(postgres_server: str, template_database: str) -> Iterator[httpx.Client]:
    """A live sidecar over HTTP that was sent 1,500 requests of three segments, then 300 in which acceptance
    in `german` is .35 instead of .70: the detector has opened an incident of it."""
    for url in fresh_database(postgres_server, template=template_database):
        database = Database.open(url)
        try:
            with TemporaryDirectory() as data, running_sidecar(database, Path(data)) as client:
                start = datetime.now(UTC) - timedelta(minutes=5)
                traffic = Traffic(seed=20, start=start, seconds_apart=0.09)
                post(client, traffic.draw(1500, GOOD))
                post(client, traffic.draw(300, BAD))
                wait_until(lambda: _shows_incident(client), "the incident in the metrics")
                # A cost that was measured before the fall would be measured again only a minute later.
                with database.session() as session:
                    session.execute(delete(StreamCost))
                wait_until(lambda: _tells_loss(client), "what the fall costs")
                yield client
        finally:
            database.close()


@pytest.fixture(scope="session")  # as the sidecar is, which keeps the traffic sent here
def prometheus(
    drifted_sidecar: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus with the committed rules, their waits 60 times shorter, that has scraped the drifted
    sidecar while more of its traffic came: counters have a rate."""
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed")
    directory = tmp_path_factory.mktemp("prometheus")
    base = str(drifted_sidecar.base_url)
    with running_prometheus(directory, [base], hastened_rules(TIMES)) as server:
        traffic = Traffic(seed=21, start=datetime.now(UTC) - timedelta(seconds=60), seconds_apart=0.1)
        wait_until(lambda: _records(server) == 1_800, "the first scrape")
        for sent in range(1, SCRAPES_OF_TRAFFIC + 1):
            post(drifted_sidecar, traffic.draw(30, BAD))
            wait_until(lambda: _records(server) == 1_800 + 30 * sent, "a scrape of new traffic")  # noqa: B023
        yield server


def _shows_incident(client: httpx.Client) -> bool:
    text = client.get("/metrics").text
    return bool(re.search(r'^driftguard_incidents_open{direction="down".* 1\.0$', text, re.MULTILINE))


def _tells_loss(client: httpx.Client) -> bool:
    (stream,) = client.get("/api/v1/status").json()["streams"]
    return bool(stream["cost"] and stream["cost"]["lost"])


def _records(server: Prometheus) -> float:
    return sum(server.values("sum(driftguard_records_total)"))
