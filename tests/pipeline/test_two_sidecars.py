"""Two sidecars on one database: each reads of the other's work what changed, and no more."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from unittest.mock import Mock
from uuid import uuid4

import numpy as np
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from driftguard.detection import DetectorConfig
from driftguard.detection.state.codec import StoredState
from driftguard.metrics import Metrics
from driftguard.pipeline import batch_fold, held, state_cache
from driftguard.pipeline.fold_loop import TAKE_OVER_SECONDS, Pipeline
from driftguard.records import AcceptanceRecord
from driftguard.status.fold_watch import FoldWatch
from driftguard.store import folding
from driftguard.store.database import Database
from driftguard.store.folding import Progress
from tests.alerting.http_receiver import wait_until
from tests.pipeline.test_fold_loop import fold_all
from tests.pipeline.test_held_streams import all_states, described_in_the_end, from_scratch
from tests.pipeline.traffic import Traffic, all_summaries, store

CONFIG = DetectorConfig(minimum_drop=0.1)
SERVERS = tuple(f"server {number}" for number in range(6))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Streams whose state was read, in order."""
    read: list[int] = []
    load = folding.load

    def counted(session: Session, stream_ids: Collection[int]) -> dict[int, StoredState]:
        read.extend(stream_ids)
        return load(session, stream_ids)

    monkeypatch.setattr(folding, "load", counted)
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


class Clock:
    seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


def of_another_process(
    database: Database, clock: Clock, batch_records: int = 5_000, metrics: Metrics | None = None
) -> Pipeline:
    """One that takes over by that clock."""
    return Pipeline(
        database,
        CONFIG,
        metrics or Metrics(),
        batch_records=batch_records,
        process_id=uuid4(),
        watch=FoldWatch(clock),
    )


def test_the_one_that_folded_last_goes_on_alone(database: Database, loaded: list[int]) -> None:
    traffic, clock = Traffic(seed=94), Clock()
    one, other = (of_another_process(database, clock) for _ in range(2))

    def send() -> None:
        for server in SERVERS:
            store(database, traffic.draw(10, {"chat": 0.75}, server=server))

    send()
    assert one.fold_batch() == 10 * len(SERVERS)
    loaded.clear()
    for pause in (0.5, 15.0, 3_600.0):  # without traffic
        clock.seconds += pause
        assert other.fold_batch() == 0
        send()
        assert other.fold_batch() == 0
        assert one.fold_batch() == 10 * len(SERVERS)
    assert loaded == []
    send()
    assert other.fold_batch() == 0
    clock.seconds += TAKE_OVER_SECONDS - 0.1
    assert other.fold_batch() == 0
    clock.seconds += 0.1  # without a fold
    assert other.fold_batch() == 10 * len(SERVERS)
    send()
    assert one.fold_batch() == 0
    assert other.fold_batch() == 10 * len(SERVERS)
    described_in_the_end(other)
    assert all_states(database) == from_scratch(database)


def test_a_fold_that_fails_keeps_nobody_else_from_folding(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic, clock = Traffic(seed=95), Clock()
    one, other = (of_another_process(database, clock) for _ in range(2))
    store(database, traffic.draw(10, {"chat": 0.75}))
    assert one.fold_batch() == 10
    store(database, traffic.draw(10, {"chat": 0.75}))
    assert other.fold_batch() == 0
    for _ in range(3):
        clock.seconds += TAKE_OVER_SECONDS / 3
        with monkeypatch.context() as patched:
            patched.setattr(folding, "set_progress", Mock(side_effect=RuntimeError("planted")))
            with pytest.raises(RuntimeError, match="planted"):
                one.fold_batch()
    assert other.fold_batch() == 10
    assert one.fold_batch() == 0


def test_one_that_stops_hands_over_at_once(database: Database) -> None:
    traffic = Traffic(seed=96)
    one, other = (of_another_process(database, Clock()) for _ in range(2))
    store(database, traffic.draw(10, {"chat": 0.75}))
    one.start()
    wait_until(lambda: position(database) == 10, "the fold")
    store(database, traffic.draw(10, {"chat": 0.75}))
    one.stop()
    other.fold_batch()
    assert position(database) == 20


def position(database: Database) -> int:
    with database.session() as session:
        return folding.position(session)


def test_one_that_waits_is_alive(database: Database) -> None:
    metrics = Metrics()
    store(database, Traffic(seed=97).draw(10, {"chat": 0.75}))
    of_another_process(database, Clock()).fold_batch()
    before = time.time()
    assert of_another_process(database, Clock(), metrics=metrics).fold_batch() == 0
    assert metrics.fold.last_round._value.get() >= before


def test_a_stream_that_is_held_is_tried_again_by_whoever_takes_over(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "RETRY_AFTER_SECONDS", (0.0,))
    clock = Clock()
    one, other = (of_another_process(database, clock) for _ in range(2))
    store(database, Traffic(seed=98).draw(10, {"chat": 0.75}))
    with monkeypatch.context() as patched:
        patched.setattr(batch_fold, "fold_many", Mock(side_effect=RuntimeError("planted")))
        assert one.fold_batch() == 10
    for pause, folded in ((0.0, 0), (TAKE_OVER_SECONDS - 0.1, 0), (0.1, 10)):
        clock.seconds += pause
        assert other.fold_batch() == folded
    with database.session() as session:
        assert folding.unfolded(session) == 0


def test_what_it_folded_is_shown_by_one_that_folds_no_longer(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_cache, "DESCRIBED_PER_BATCH", 1)
    traffic, clock = Traffic(seed=99), Clock()
    one, other = (of_another_process(database, clock) for _ in range(2))
    for records in (10, 5):
        for server in SERVERS:
            store(database, traffic.draw(records, {"chat": 0.75}, server=server))
        one.fold_batch()
    store(database, traffic.draw(5, {"chat": 0.75}, server=SERVERS[0]))
    for pause in (0.0, TAKE_OVER_SECONDS):
        clock.seconds += pause
        other.fold_batch()
    for _ in (*SERVERS, ""):
        one.fold_batch()
        clock.seconds += TAKE_OVER_SECONDS
    with database.session() as session:
        shown = {stream_id: each["requests"] for stream_id, each in all_summaries(session).items()}
    assert shown == {1: 20, 2: 15, 3: 15, 4: 15, 5: 15, 6: 15}


@pytest.mark.slow
def test_taking_over_gives_what_one_fold_from_scratch_gives(database: Database) -> None:
    """Rare segments, streams that fall silent, changes, restarts, a version that does not count its folds,
    and one that folds whoever did before, and does not say who it is."""
    traffic, random, clock = Traffic(seed=92), np.random.default_rng(93), Clock()

    def new() -> Pipeline:
        return of_another_process(database, clock, int(random.integers(20, 200)))

    pipelines, unaware = (
        [new(), new()],
        Pipeline(database, CONFIG, Metrics(), process_id=uuid4(), take_over_seconds=0.0),
    )
    takers = []
    for turn in range(60):
        rate = 0.4 if turn > 35 else 0.75
        store(database, shuffled(traffic, random, rate))
        for place in random.permutation(len(pipelines)):
            for _ in range(int(random.integers(0, 3))):
                before = progress(database)
                pipelines[place].fold_batch()
                if progress(database).folded_by != before.folded_by:
                    takers.append(place)
            clock.seconds += float(random.exponential(TAKE_OVER_SECONDS / 2))
        if turn % 9 == 8:
            pipelines[int(random.integers(2))] = new()
        if turn % 7 == 6:
            before = progress(database)
            unaware.fold_batch()
            with database.session() as session:
                folding.set_progress(session, progress(database)._replace(folded_by=before.folded_by))
        if turn == 20:
            with database.session() as session:
                session.execute(text("UPDATE fold_positions SET folds = 0"))
                session.execute(text("UPDATE detector_states SET fold = 0"))
    assert len(takers) > 5
    fold_all(unaware)
    for pipeline in [*pipelines, unaware] * len(SERVERS):
        clock.seconds += TAKE_OVER_SECONDS
        pipeline.fold_batch()
    together = all_states(database)
    assert Counter(row[0] for row in together).keys() == {1, 2, 3, 4, 5, 6}
    assert together == from_scratch(database)


def progress(database: Database) -> Progress:
    with database.session() as session:
        return folding.progress(session)


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
