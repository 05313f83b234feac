"""A stream whose stored detector state cannot be read: what the status, the gauge and the page say until a
baseline is learned."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select, text

from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.pipeline.look_around import LookAround
from driftguard.status.gather import gather
from driftguard.status.stream_status import StreamStatus
from driftguard.store.database import Database
from driftguard.store.tables import Stream
from tests.api.ingest_server import is_held_up
from tests.api.pages.reading import text_of
from tests.pipeline.sidecar import running_sidecar
from tests.pipeline.traffic import Traffic, store

GOOD = {"code": 0.75, "german": 0.7}
CONFIG = DetectorConfig(minimum_drop=0.1)
ANOTHER_VERSION, NONSENSE = "set_byte(state, 7, 200)", "'nonsense'"


def fold_all(database: Database) -> Metrics:
    """As a process that has just started."""
    metrics = Metrics()
    pipeline = Pipeline(database, CONFIG, metrics)
    while pipeline.fold_batch():
        pass
    return metrics


def status_of(database: Database, traffic: Traffic) -> StreamStatus:
    with database.session() as session:
        (found,) = gather(session, traffic.clock + timedelta(minutes=1))
    return found


@pytest.mark.parametrize(
    ("stored", "verdict", "word", "because"),
    [
        (
            ANOTHER_VERSION,
            "relearning",
            "Relearning",
            "the detector's state was stored by another version of DriftGuard",
        ),
        (NONSENSE, "insufficient_data", "Insufficient data", "the stored detector state is damaged"),
    ],
)
def test_it_is_told_until_a_baseline_is_learned(
    database: Database, tmp_path: Path, stored: str, verdict: str, word: str, because: str
) -> None:
    traffic = Traffic(seed=11)
    store(database, traffic.draw(1000, GOOD), traffic.clock)
    fold_all(database)
    assert status_of(database, traffic).verdict == "steady"

    with database.session() as session:
        session.execute(text(f"UPDATE detector_states SET state = {stored}::bytea"))
    store(database, traffic.draw(10, GOOD), traffic.clock)
    fold_all(database)
    found = status_of(database, traffic)
    assert found.verdict == verdict
    assert found.stream.begun_anew_at is not None
    told = f"{word} since {found.stream.begun_anew_at:%F %T} UTC: {because}; baselines are relearned. "
    assert found.text.startswith(f"{told}10 requests so far; ")
    metrics = Metrics()
    LookAround(database, metrics).look(traffic.clock + timedelta(minutes=1))
    assert f'verdict="{verdict}"}} 1.0'.encode() in metrics.exposition()
    with running_sidecar(database, tmp_path) as client:
        assert told in text_of(client.get("/").text)

    store(database, traffic.draw(1000, GOOD), traffic.clock)
    fold_all(database)
    found = status_of(database, traffic)
    assert (found.verdict, found.stream.begun_anew_at) == ("steady", None)
    assert found.text.startswith("Steady: ")


@pytest.mark.parametrize("writer", ["the fold", "the ingest"])
def test_streams_are_changed_in_one_order_by_all_that_change_several(database: Database, writer: str) -> None:
    """After an upgrade the fold begins many streams anew while their records arrive: in different orders each
    would wait for the other."""
    traffic = Traffic(seed=11)
    servers = [f"chat-{number}" for number in range(20)]
    store(database, [one for server in servers for one in traffic.draw(1, GOOD, server=server)])
    fold_all(database)
    newest_first = [one for server in reversed(servers) for one in traffic.draw(1, GOOD, server=server)]
    write: Callable[[], object] = partial(store, database, newest_first)
    if writer == "the fold":
        with database.session() as session:
            session.execute(text(f"UPDATE detector_states SET state = {ANOTHER_VERSION}::bytea"))
        write()
        write = partial(fold_all, database)
    with ThreadPoolExecutor(1) as threads:
        with database.session() as session:
            in_order = select(Stream.id).order_by(Stream.id)
            session.execute(in_order.limit(1).with_for_update(key_share=True))
            written = threads.submit(write)
            while not is_held_up(database) and not written.done():
                pass
            session.execute(in_order.with_for_update(key_share=True, nowait=True))
        written.result()


def test_the_first_request_of_a_stream_is_counted_in_a_whole_sentence(database: Database) -> None:
    traffic = Traffic(seed=12)
    store(database, traffic.draw(1, GOOD), traffic.clock)
    assert status_of(database, traffic).text == "Insufficient data: 0 requests so far."
    fold_all(database)
    told = "Insufficient data: 1 request so far; at least 99 more are needed before a change can be detected."
    assert status_of(database, traffic).text == told
