"""Rounded counters of llama.cpp that a collector sends: windows go on over several exports."""

from __future__ import annotations

import time

from driftguard.api.application import http_application
from driftguard.api.context import Context
from driftguard.ingest.queue import IngestQueue
from driftguard.metrics import Metrics
from driftguard.settings import Settings
from driftguard.sources.otlp_push import PushedSources
from driftguard.store import sources
from driftguard.store.database import Database
from tests.adapters.fake_engines import FakeLlamaCpp, K
from tests.adapters.otlp_exports import exported
from tests.api.ingest_server import serving

SECONDS, EXPORTS = 15, 12
STEPS = 2_500  # of each export: 10,000 draft tokens, a twentieth of a window at 500 million


def test_the_interval_of_a_source_is_that_of_its_exports(database: Database) -> None:
    metrics = Metrics()
    engine = FakeLlamaCpp(steps=125_000_000, drafted=[125_000_000] * K, accepted=[90_000_000] * K)
    queue = IngestQueue(database, max_queued_records=1_000, metrics=metrics)
    app, pushed = http_application(), PushedSources(database, queue.submit, metrics, ())
    app.state.context = Context(Settings(), database, queue, metrics, pushed)
    begun_ns = time.time_ns() - EXPORTS * SECONDS * 10**9
    queue.start()
    with serving(app) as client:
        for number in range(EXPORTS):
            at_ns = begun_ns + number * SECONDS * 10**9
            engine.steps += STEPS
            engine.drafted = [count + STEPS for count in engine.drafted]
            engine.accepted = [count + STEPS // 2 for count in engine.accepted]
            if number == EXPORTS - 1:  # enough for the window to end here
                engine.steps += 20 * STEPS
                engine.drafted = [count + 20 * STEPS for count in engine.drafted]
            body = exported(engine.text(), at_ns, service__instance__id="pushed", driftguard__target="t")
            headers = {"Content-Type": "application/x-protobuf"}
            assert (
                client.post("/v1/metrics", content=body.SerializeToString(), headers=headers).status_code
                == 200
            )
        with database.session() as session:
            (source,) = sources.all_sources(session)
    queue.stop()
    assert source.interval_seconds == SECONDS
