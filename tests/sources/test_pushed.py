"""One server whose metrics a collector sends, while the database does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest

from driftguard.api.application import http_application
from driftguard.api.context import Context
from driftguard.ingest.queue import IngestQueue
from driftguard.metrics import Metrics
from driftguard.settings import Settings
from driftguard.sources.otlp_push import PushedSources
from driftguard.store.database import Database
from tests.adapters.fake_engines import FakeVllm, K
from tests.adapters.otlp_exports import exported
from tests.api.ingest_server import serving
from tests.sources.stored import Stored


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.fixture
def client(database: Database, stored: Stored) -> Iterator[httpx.Client]:
    metrics = Metrics()
    app, pushed = http_application(), PushedSources(database, stored.submit, metrics, ())
    queue = IngestQueue(database, max_queued_records=1_000, metrics=metrics)
    app.state.context = Context(Settings(), database, queue, metrics, pushed)
    with serving(app) as client:
        yield client


@pytest.mark.parametrize("outages", [["is_away"], ["is_unanswered"], ["is_unanswered", "is_full"]])
@pytest.mark.parametrize("is_sent_again", [False, True])
def test_what_was_counted_while_the_database_was_away_is_stored_once(
    client: httpx.Client, stored: Stored, outages: list[str], is_sent_again: bool
) -> None:
    """Also where a window was stored whose commit was not answered, and the queue is full afterwards; whether
    the collector sends an export again or drops it."""
    engine, at_ns = FakeVllm(), time.time_ns() - 600 * 10**9
    steps: list[int] = []
    wanted = 200

    def export(times: int = 1) -> None:
        nonlocal at_ns
        at_ns += 30 * 10**9
        engine.serve([3] * 10)
        steps.append(10)
        body = exported(engine.text(), at_ns, service__instance__id="chat").SerializeToString()
        headers = {"Content-Type": "application/x-protobuf"}
        for _ in range(times):
            answer = client.post("/v1/metrics", content=body, headers=headers)
            assert answer.status_code == wanted

    export()
    export()
    for outage in outages:
        setattr(stored, outage, True)
        wanted = 429 if stored.is_full else 503
        for _ in range(3):
            export(2 if is_sent_again else 1)
        setattr(stored, outage, False)
    wanted = 200
    export()
    export()
    found = sorted(stored.records, key=lambda record: record.ended_at)
    assert sum(record.steps for record in found) == sum(steps[1:])
    assert all(record.drafted == record.steps * K for record in found)
    for earlier, later in pairwise(found):
        assert later.started_at == earlier.ended_at
