"""Every adapter, the same history, the same incident: over real HTTP into a real database and detector;
scraped, and pushed as OTLP.

Windows come as fast as they can be scraped, so their traffic per day is enormous; the detector's setting
for false alarms is scaled accordingly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import aiohttp
import numpy as np
import pytest
from sqlalchemy import select

from driftguard.api.application import http_application
from driftguard.api.context import Context
from driftguard.detection import DetectorConfig
from driftguard.ingest.queue import IngestQueue
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records.documents.incident import names_of
from driftguard.settings import ScrapingSettings, Settings, SourceSettings
from driftguard.sources.otlp_push import PushedSources
from driftguard.sources.scrape import open_client, scrape
from driftguard.sources.source import Source
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Stream
from tests.adapters.fake_engines import ENGINES, FakeEngine, FakeVllm, K
from tests.adapters.otlp_exports import exported
from tests.api.ingest_server import serving
from tests.pipeline.examining import fold_and_examine
from tests.sources.served import ok, served

SEED = 20261122
BEFORE, AFTER = 30, 15  # windows
STEPS = 2_400  # of a window


def history() -> list[list[int]]:
    """Accepted draft tokens of each step [windows][STEPS]; a chain of K, .8 each, then .6 each."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    windows = []
    for number in range(BEFORE + AFTER):
        chance = 0.8 if number < BEFORE else 0.6
        kept = rng.random((STEPS, K)) < chance
        windows.append(np.cumprod(kept, axis=1).sum(axis=1).tolist())
    return windows


def acceptance(windows: list[list[int]]) -> float:
    return sum(map(sum, windows)) / (K * STEPS * len(windows))


@pytest.fixture(scope="module")
def found(module_database_url: str) -> Iterator[dict[str, tuple[Stream, list[Incident], datetime]]]:
    """Engine -> its stream, its incidents, and the moment of the true change."""
    database, metrics = Database.open(module_database_url), Metrics()
    queue = IngestQueue(database, max_queued_records=1_000, metrics=metrics)
    queue.start()
    try:
        changed_at = asyncio.run(play(queue)) | play_pushed(database, queue, metrics)
        pipeline = Pipeline(database, DetectorConfig(false_alarm_days=0.001), metrics)
        fold_and_examine(pipeline, database)
        with database.session() as session:
            known = session.scalars(select(Stream)).all()
            yield {
                stream.server: (
                    stream,
                    incidents.unresolved_of(session, stream.id, "down"),
                    changed_at[stream.server],
                )
                for stream in known
            }
    finally:
        queue.stop()
        database.close()


async def play(queue: IngestQueue) -> dict[str, datetime]:
    changed_at: dict[str, datetime] = {}
    with ExitStack() as stack:
        async with open_client(ScrapingSettings()) as client:
            for make in ENGINES:
                engine = make()
                server = stack.enter_context(served({make.path: ok(engine.text)}))
                settings = SourceSettings(
                    url=server.url, server=make.kind, target="t", num_speculative_tokens=K
                )
                changed_at[make.kind] = await replay(client, engine, Source.of(settings), queue)
    return changed_at


async def replay(
    client: aiohttp.ClientSession, engine: FakeEngine, source: Source, queue: IngestQueue
) -> datetime:
    def submit(records: Any) -> Future[Any]:
        return queue.submit(records)

    engine.serve([1])
    assert (await scrape(client, source, submit)).condition == "waiting"
    changed_at = datetime.now(UTC)
    for number, accepted in enumerate(history()):
        if number == BEFORE:
            changed_at = datetime.now(UTC)
        engine.serve(accepted, requests=3)
        assert (await scrape(client, source, submit)).condition == "reporting"
    return changed_at


def play_pushed(database: Database, queue: IngestQueue, metrics: Metrics) -> dict[str, datetime]:
    """vLLM's metrics as a collector sends them."""
    app, engine = http_application(), FakeVllm()
    pushed = PushedSources(database, queue.submit, metrics, ())
    app.state.context = Context(Settings(), database, queue, metrics, pushed)
    changed_at = datetime.now(UTC)
    with serving(app) as client:
        for number, accepted in enumerate([[1], *history()]):
            if number == BEFORE + 1:
                changed_at = datetime.now(UTC)
            engine.serve(accepted, requests=3)
            body = exported(
                engine.text(), time.time_ns(), service__instance__id="pushed", driftguard__target="t"
            )
            headers = {"Content-Type": "application/x-protobuf"}
            answer = client.post("/v1/metrics", content=body.SerializeToString(), headers=headers)
            assert (answer.status_code, answer.content) == (200, b"")
    return {"pushed": changed_at}


@pytest.mark.parametrize("server", [*(make.kind for make in ENGINES), "pushed"])
def test_a_drift_ends_in_the_same_incident(
    server: str, found: dict[str, tuple[Stream, list[Incident], datetime]]
) -> None:
    stream, (incident,), changed_at = found[server]
    windows = history()
    assert incident.acceptance_before == pytest.approx(acceptance(windows[:BEFORE]), abs=0.02)
    assert incident.acceptance_after == pytest.approx(acceptance(windows[BEFORE:]), abs=0.03)
    assert incident.interval_start_at <= changed_at <= incident.interval_end_at
    assert names_of(incident.segments) == ("default",)
    assert stream.target == "t"


def test_the_incidents_agree_to_the_token(found: dict[str, tuple[Stream, list[Incident], datetime]]) -> None:
    told = {(incident.acceptance_before, incident.acceptance_after) for _, (incident,), _ in found.values()}
    assert len(found) == len(ENGINES) + 1
    assert len(told) == 1
