"""Rounded counters of llama.cpp that a collector sends: windows go on over several exports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from sqlalchemy import select

from driftguard.api.application import http_application
from driftguard.api.context import Context
from driftguard.ingest.queue import IngestQueue
from driftguard.metrics import Metrics
from driftguard.settings import Settings
from driftguard.sources.otlp_push import PushedSources
from driftguard.sources.scrape import Submit
from driftguard.store import sources
from driftguard.store.database import Database
from driftguard.store.tables import Record, Source
from tests.adapters.fake_engines import FakeLlamaCpp, K
from tests.adapters.otlp_exports import exported
from tests.api.ingest_server import serving

SECONDS, EXPORTS = 15, 12
STEPS = 2_500  # of each export: 10,000 draft tokens, a twentieth of a window at 500 million


class Pushing:
    """A llama.cpp that has drafted `drafted` tokens, and what a collector sends of it."""

    def __init__(self, client: httpx.Client, database: Database, drafted: int) -> None:
        self.client, self.database = client, database
        steps = drafted // K
        self.engine = FakeLlamaCpp(steps=steps, drafted=[steps] * K, accepted=[steps * 7 // 10] * K)
        self.at_ns = self.start_ns = time.time_ns() - EXPORTS * SECONDS * 10**9

    def serve(self, steps: int) -> None:
        self.engine.steps += steps
        self.engine.drafted = [count + steps for count in self.engine.drafted]
        self.engine.accepted = [count + steps // 2 for count in self.engine.accepted]

    def export(self, text: str) -> None:
        names = {"service__instance__id": "pushed", "driftguard__target": "t"}
        body = exported(text, self.at_ns, start_ns=self.start_ns, **names)
        headers = {"Content-Type": "application/x-protobuf"}
        answer = self.client.post("/v1/metrics", content=body.SerializeToString(), headers=headers)
        assert answer.status_code == 200

    def next(self) -> str:
        """The condition after an export, SECONDS after the one before."""
        self.at_ns += SECONDS * 10**9
        self.export(self.engine.text())
        return self.source.condition

    @property
    def source(self) -> Source:
        with self.database.session() as session:
            (source,) = sources.all_sources(session)
            return source


@contextmanager
def receiving(database: Database, submit: Submit | None = None) -> Iterator[httpx.Client]:
    """Of a sidecar that takes exports. `submit`: in place of its ingest queue."""
    metrics = Metrics()
    queue = IngestQueue(database, max_queued_records=1_000, metrics=metrics)
    app, pushed = http_application(), PushedSources(database, submit or queue.submit, metrics, ())
    app.state.context = Context(Settings(), database, queue, metrics, pushed)
    queue.start()
    with serving(app) as client:
        yield client
    queue.stop()


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    with receiving(database) as client:
        yield client


def test_the_interval_of_a_source_is_that_of_its_exports(client: httpx.Client, database: Database) -> None:
    pushing = Pushing(client, database, 5 * 10**8)
    for number in range(EXPORTS):
        pushing.serve(STEPS if number < EXPORTS - 1 else 21 * STEPS)  # enough for the window to end here
        pushing.next()
    assert pushing.source.interval_seconds == SECONDS


def test_an_idle_server_and_one_that_stopped_drafting_are_told_so_though_a_window_goes_on(
    client: httpx.Client, database: Database
) -> None:
    pushing = Pushing(client, database, 5 * 10**6)
    assert pushing.next() == "waiting"
    pushing.serve(100)
    assert pushing.next() == "reporting"
    assert pushing.next() == "idle"
    for _ in range(2):
        pushing.engine.plain_tokens += 30_000
        assert pushing.next() == "drafting_stopped"
    with database.session() as session:
        assert list(session.scalars(select(Record.drafted))) == [0, 0]


def test_a_reading_that_comes_in_two_exports_is_not_taken_for_idle_by_its_second_half(
    client: httpx.Client, database: Database
) -> None:
    pushing = Pushing(client, database, 5 * 10**6)
    pushing.next()
    pushing.serve(100)
    pushing.at_ns += SECONDS * 10**9
    lines = pushing.engine.text().splitlines(keepends=True)
    gauges = [line for line in lines if line.startswith("llamacpp:requests_")]
    pushing.export("".join(line for line in lines if line not in gauges))
    assert pushing.source.condition == "reporting"
    pushing.export("".join(gauges))
    assert pushing.source.condition == "reporting"


def test_a_collector_that_starts_again_while_a_window_goes_on_restarts_no_server(
    client: httpx.Client, database: Database
) -> None:
    """It does not know when counters began that it finds, and says that they began with its first point."""
    pushing = Pushing(client, database, 5 * 10**6)
    for number in range(8):
        pushing.serve(100)
        if number == 3:
            pushing.start_ns = pushing.at_ns + SECONDS * 10**9
        assert pushing.next() == ("reporting" if number else "waiting")
    with database.session() as session:
        assert session.scalars(select(Record.drafted)).all() == [2_000]
