"""What is written of a detector's state per batch, and when the status shows it."""

from __future__ import annotations

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from driftguard.detection import DetectorConfig, StreamState
from driftguard.detection.state.codec import from_parts
from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics
from driftguard.pipeline import state_cache
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store import folding
from driftguard.store.database import Database
from driftguard.store.tables import DetectorHistory, DetectorState, Stream
from tests.alerting.http_receiver import wait_until
from tests.pipeline.test_fold_loop import CONFIG, GOOD, fold_all, new_pipeline
from tests.pipeline.traffic import Traffic, all_summaries, store


def stored_state(database: Database) -> StreamState:
    with database.session() as session:
        stream_id = session.scalars(select(DetectorState.stream_id)).one()
        return from_parts(folding.load(session, [stream_id])[stream_id])


def pieces(database: Database) -> dict[int, str]:
    """Number -> the transaction that wrote the piece."""
    with database.session() as session:
        rows = session.execute(text("SELECT number, xmin::text FROM detector_histories ORDER BY number"))
        return {row.number: row.xmin for row in rows}


def test_pieces_of_the_history_are_written_once_and_removed_once_they_fell_out(database: Database) -> None:
    config = DetectorConfig(minimum_drop=0.1, history=1_000)
    traffic, pipeline = Traffic(seed=41), Pipeline(database, config, Metrics(), batch_records=150)
    store(database, traffic.draw(1_200, GOOD))
    fold_all(pipeline)
    before = pieces(database)
    assert list(before) == [0, 1]
    store(database, traffic.draw(900, GOOD))
    fold_all(pipeline)
    after = pieces(database)
    assert list(after) == [2, 3]
    store(database, traffic.draw(550, GOOD))
    fold_all(Pipeline(database, config, Metrics(), batch_records=150))  # restarted
    assert list(pieces(database)) == [3, 4]
    assert pieces(database)[3] == after[3]
    state = stored_state(database)
    assert len(state.history) == 1_000
    assert state.history.wide("ordinal").tolist() == list(range(1_651, 2_651))


def test_a_missing_piece_is_a_damaged_state(database: Database) -> None:
    traffic = Traffic(seed=42)
    store(database, traffic.draw(1_200, GOOD))
    fold_all(new_pipeline(database))
    with database.session() as session:
        session.execute(text("DELETE FROM detector_histories WHERE number = 0"))
    store(database, traffic.draw(700, GOOD))
    metrics = Metrics()
    fold_all(Pipeline(database, CONFIG, metrics))
    assert "driftguard_detector_states_lost_total 1.0" in metrics.exposition().decode()
    assert stored_state(database).requests == 700
    with database.session() as session:
        assert session.scalars(select(DetectorHistory.number)).all() == [0]


def test_every_stream_is_shown_as_it_is_after_a_while(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_cache, "DESCRIBED_PER_BATCH", 2)
    servers = [f"server {number}" for number in range(7)]
    traffic, pipeline = Traffic(seed=43), new_pipeline(database, batch_records=5_000)

    def shown() -> list[int]:
        with database.session() as session:
            return sorted(int(each["requests"]) for each in all_summaries(session).values())

    for records in (30, 20):
        for server in servers:
            store(database, traffic.draw(records, GOOD, server=server))
        fold_all(pipeline)
    assert shown()[0] == 30  # new streams are shown at once, later records in turn
    for _ in servers:
        assert pipeline.fold_batch() == 0
    assert shown() == [50] * len(servers)


def test_a_state_that_was_deleted_begins_anew(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "DESCRIBED_PER_BATCH", 1)
    traffic, pipeline = Traffic(seed=44), new_pipeline(database, batch_records=5_000)
    servers = ("chat", "mail", "code")
    for records in (60, 40):
        for server in servers:
            store(database, traffic.draw(records, GOOD, server=server))
        fold_all(pipeline)
    with database.session() as session:
        session.execute(text("DELETE FROM detector_states"))
    for _ in servers:
        assert pipeline.fold_batch() == 0  # what is shown of those that waited
    for server in servers:
        store(database, traffic.draw(30, GOOD, server=server))
    pipeline.start()  # the first batch fails; what is in memory is then forgotten
    try:
        wait_until(lambda: unfolded(database) == 0, "the fold to go on")
    finally:
        pipeline.stop()
    with database.session() as session:
        assert {each["requests"] for each in all_summaries(session).values()} == {30}


def unfolded(database: Database) -> int:
    with database.session() as session:
        return folding.unfolded(session)


def test_a_beginning_that_was_rolled_back_is_made_again_and_the_other_states_stay_in_memory(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic, metrics, away = Traffic(seed=45), Metrics(), [False]

    def hook(session: Session, *_: object) -> None:
        if away[0]:
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    pipeline = Pipeline(database, CONFIG, metrics, after_fold=[hook])
    for server in ("chat", "mail"):
        store(database, traffic.draw(40, GOOD, server=server))
        fold_all(pipeline)
    with database.session() as session:
        session.execute(text("UPDATE detector_states SET state = 'nonsense' WHERE stream_id = 2"))
    pipeline._states.forget([2])
    store(database, traffic.draw(10, GOOD, server="mail"))
    away[0] = True
    with pytest.raises(DatabaseUnavailable) as failure:
        pipeline.fold_batch()
    pipeline._report(failure.value)
    assert len(pipeline._states) == 1
    away[0] = False
    fold_all(pipeline)
    with database.session() as session:
        begun = session.scalars(select(Stream.begun_anew_because).order_by(Stream.id)).all()
        summaries = all_summaries(session)
    assert [each is not None for each in begun] == [False, True]
    assert {stream_id: each["requests"] for stream_id, each in summaries.items()} == {1: 40, 2: 10}
