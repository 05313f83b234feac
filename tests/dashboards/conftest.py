"""A Prometheus that scrapes a live sidecar with an incident, one whose draft was retrained, and an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from driftguard.store.database import Database
from tests.alerting.http_receiver import wait_until
from tests.conftest import fresh_database
from tests.dashboards.fed import MendedSidecar, ServingEngine, exposed
from tests.integration.conftest import BAD
from tests.integration.conftest import drifted_sidecar as drifted_sidecar  # noqa: PLC0414 (a fixture, shared)
from tests.integration.servers import PROMETHEUS, Prometheus, running_prometheus
from tests.pipeline.sidecar import post
from tests.pipeline.traffic import Traffic, with_positions

SCRAPES = 3


@dataclass(frozen=True, slots=True)
class Fleet:
    """`drifted`, `mended`, `engine`: values of the label `instance`."""

    prometheus: Prometheus
    drifted: str
    mended: str
    engine: str


@pytest.fixture(scope="session")
def fleet(
    drifted_sidecar: httpx.Client,
    postgres_server: str,
    template_database: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed")
    for url in fresh_database(postgres_server, template=template_database):
        database = Database.open(url)
        try:
            mended, engine = MendedSidecar(database), ServingEngine()
            with exposed(mended.exposition) as mended_url, exposed(engine.metrics.text) as engine_url:
                urls = [str(drifted_sidecar.base_url), mended_url, engine_url]
                directory = tmp_path_factory.mktemp("prometheus-of-dashboards")
                with running_prometheus(directory, urls) as prometheus:
                    found = Fleet(prometheus, *(_instance(url) for url in urls))
                    _go_on(found, drifted_sidecar, mended, engine)
                    yield found
        finally:
            database.close()


def _go_on(fleet: Fleet, drifted: httpx.Client, mended: MendedSidecar, engine: ServingEngine) -> None:
    """All counters increase between scrapes, so that they have a rate."""
    traffic = Traffic(seed=23, start=datetime.now(UTC) - timedelta(seconds=60), seconds_apart=0.1)
    for count in range(1, SCRAPES + 1):
        post(drifted, with_positions(traffic.draw(30, BAD)))
        mended.go_on()
        engine.go_on()
        wait_until(lambda: _fewest_samples(fleet) > count, "another scrape of everything")  # noqa: B023


def _fewest_samples(fleet: Fleet) -> float:
    """Successful scrapes so far of the target that was scraped least often."""
    samples = fleet.prometheus.query("sum_over_time(up[5m])")
    return min(float(sample["value"][1]) for sample in samples) if len(samples) == 3 else 0


def _instance(url: str) -> str:
    return url.rstrip("/").removeprefix("http://")
