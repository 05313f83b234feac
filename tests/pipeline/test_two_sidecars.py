"""Two sidecars on one database: each reads of the other's work what changed, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import timedelta
from uuid import uuid4

import numpy as np
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from driftguard.detection import DetectorConfig
from driftguard.detection.stored import StoredState
from driftguard.metrics import Metrics
from driftguard.pipeline import Pipeline
from driftguard.records import AcceptanceRecord
from driftguard.store import detector_states
from driftguard.store.database import Database
from tests.alerting.http_receiver import wait_until
from tests.pipeline.test_held_streams import all_states, described_in_the_end, from_scratch
from tests.pipeline.traffic import Traffic, store

CONFIG = DetectorConfig(minimum_drop=0.1)
SERVERS = tuple(f"server {number}" for number in range(6))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Streams whose state was read, in order."""
    read: list[int] = []
    load = detector_states.load

    def counted(session: Session, stream_ids: Collection[int]) -> dict[int, StoredState]:
        read.extend(stream_ids)
        return load(session, stream_ids)

    monkeypatch.setattr(detector_states, "load", counted)
    return read


def test_only_the_states_that_the_other_wrote_are_read_again(database: Database, loaded: list[int]) -> None:
    traffic = Traffic(seed=91)
    one, other = (Pipeline(database, CONFIG, Metrics()) for _ in range(2))

    def send(pipeline: Pipeline, *servers: str) -> list[int]:
        """Folds ten records of each; what was read for it."""
        for server in servers:
            store(database, traffic.draw(10, {"chat": 0.75}, server=server))
        loaded.clear()
        assert pipeline.fold_batch() == 10 * len(servers)
        return sorted(loaded)

    everything = list(range(1, len(SERVERS) + 1))
    assert send(one, *SERVERS) == everything
    assert send(other, *SERVERS) == everything
    assert send(one, *SERVERS) == everything  # the other wrote them all
    assert send(other, SERVERS[0]) == [1]
    assert send(one, *SERVERS[:2]) == [1]  # its own five are still those that are stored
    assert send(one, *SERVERS) == []
    assert send(other, *SERVERS[1:3]) == [2, 3]


def test_the_one_that_folded_last_goes_on_alone(database: Database, loaded: list[int]) -> None:
    traffic = Traffic(seed=94)
    one, other = (
        Pipeline(database, CONFIG, Metrics(), process_id=uuid4(), lease=timedelta(hours=1)) for _ in range(2)
    )

    def send() -> None:
        for server in SERVERS:
            store(database, traffic.draw(10, {"chat": 0.75}, server=server))
        loaded.clear()

    for _ in range(3):
        send()
        assert one.fold_batch() == 10 * len(SERVERS)
        loaded.clear()
        assert other.fold_batch() == 0
        assert loaded == []
    send()
    with database.session() as session:  # time passes without a fold of the one
        session.execute(text("UPDATE fold_positions SET leased_until = now() - interval '1 second'"))
    assert other.fold_batch() == 10 * len(SERVERS)
    assert one.fold_batch() == 0
    send()
    assert one.fold_batch() == 0
    assert other.fold_batch() == 10 * len(SERVERS)
    described_in_the_end(other)
    assert all_states(database) == from_scratch(database)


def test_a_fold_that_fails_keeps_nobody_else_from_folding(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (
        Pipeline(database, CONFIG, Metrics(), process_id=uuid4(), lease=timedelta(hours=1)) for _ in range(2)
    )
    store(database, Traffic(seed=95).draw(10, {"chat": 0.75}))
    with monkeypatch.context() as patched:

        def failing(*_: object) -> None:
            raise RuntimeError("planted")

        patched.setattr(detector_states, "set_progress", failing)
        with pytest.raises(RuntimeError, match="planted"):
            one.fold_batch()
    assert other.fold_batch() == 10


def test_one_that_stops_hands_over_at_once(database: Database) -> None:
    traffic = Traffic(seed=96)
    one, other = (
        Pipeline(database, CONFIG, Metrics(), process_id=uuid4(), lease=timedelta(hours=1)) for _ in range(2)
    )
    store(database, traffic.draw(10, {"chat": 0.75}))
    one.start()
    wait_until(lambda: position(database) == 10, "the fold")
    store(database, traffic.draw(10, {"chat": 0.75}))
    one.stop()
    other.fold_batch()
    assert position(database) == 20


def position(database: Database) -> int:
    with database.session() as session:
        return detector_states.position(session)


def test_taking_turns_gives_what_one_fold_from_scratch_gives(database: Database) -> None:
    """Rare segments, streams that fall silent, changes, restarts, a version that does not count its folds."""
    traffic, random = Traffic(seed=92), np.random.default_rng(93)

    def new() -> Pipeline:
        lease = timedelta(seconds=float(random.choice([0.0, 0.05])))
        batch_records = int(random.integers(20, 200))
        return Pipeline(
            database, CONFIG, Metrics(), batch_records=batch_records, process_id=uuid4(), lease=lease
        )

    pipelines = [new(), new()]
    for turn in range(40):
        rate = 0.4 if turn > 25 else 0.75
        store(database, shuffled(traffic, random, rate))
        for pipeline in random.permutation(np.array(pipelines)):
            for _ in range(int(random.integers(0, 3))):
                pipeline.fold_batch()
        if turn % 9 == 8:
            pipelines[int(random.integers(2))] = new()
        if turn == 20:
            with database.session() as session:
                session.execute(text("UPDATE fold_positions SET folds = 0"))
                session.execute(text("UPDATE detector_states SET fold = 0"))
    with database.session() as session:  # the leases are over
        session.execute(text("UPDATE fold_positions SET leased_until = NULL"))
    last = Pipeline(database, CONFIG, Metrics(), process_id=uuid4(), lease=timedelta())
    while last.fold_batch():
        pass
    for pipeline in [*pipelines, last] * len(SERVERS):
        pipeline.fold_batch()
    together = all_states(database)
    assert Counter(row[0] for row in together).keys() == {1, 2, 3, 4, 5, 6}
    assert together == from_scratch(database)


def shuffled(traffic: Traffic, random: np.random.Generator, rate: float) -> list[AcceptanceRecord]:
    """Of some of the servers, one record in twenty of a rare segment."""
    records = [
        record
        for server in random.permutation(SERVERS)[: random.integers(1, 7)]
        for _ in range(int(random.integers(1, 40)))
        for record in traffic.draw(
            1, {"rare" if random.random() < 0.05 else "chat": rate}, server=str(server)
        )
    ]
    return [records[place] for place in random.permutation(len(records))]
