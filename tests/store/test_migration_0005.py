"""A detector state stored before revision 0005 goes on after the upgrade: nothing is learned again."""

from __future__ import annotations

import numpy as np
from alembic import command
from sqlalchemy import select, text

from driftguard.detection import DetectorConfig, StreamState, fold
from driftguard.detection.state.codec import encode_state, from_parts
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store import folding
from driftguard.store.database import Database
from driftguard.store.migrations import alembic_config
from driftguard.store.tables import DetectorHistory, DetectorState
from tests.detection.traffic import requests
from tests.pipeline.traffic import Traffic, store

_STREAM = """
    INSERT INTO streams (server, target, draft, draft_version, method, first_seen_at, last_seen_at)
    VALUES ('chat', 'target', 'draft', 'v1', 'draft_model', now(), now()) RETURNING id
    """
_STATE = """
    INSERT INTO detector_states (stream_id, state, summary, updated_at) VALUES (:id, :state, '{}', now())
    """


def test_a_state_with_its_whole_history_inside_is_read_and_stored_in_parts(empty_database_url: str) -> None:
    config = DetectorConfig(minimum_drop=0.1)
    before, _ = fold(config, StreamState(), requests(np.random.default_rng(1), np.full(1_500, 0.7)))
    before_bytes = encode_state(before)
    database = Database.open(empty_database_url)
    try:
        with database.engine.connect() as connection:
            command.upgrade(alembic_config(connection), "0004")
            stream_id = connection.scalar(text(_STREAM))
            connection.execute(text(_STATE), {"id": stream_id, "state": before_bytes})
            connection.execute(text("INSERT INTO fold_positions (reader, seq) VALUES ('detector', 1500)"))
            connection.execute(text("SELECT setval('records_seq', 1500)"))
            connection.commit()
        database.upgrade()
        with database.session() as session:
            (stored,) = folding.load(session, [stream_id]).values()
            assert encode_state(from_parts(stored)) == before_bytes
        store(database, Traffic(seed=1).draw(50, {"chat": 0.7}))
        assert Pipeline(database, config, Metrics()).fold_batch() == 50
        with database.session() as session:
            (stored,) = folding.load(session, [stream_id]).values()
            assert session.scalars(select(DetectorState.history_rows)).all() == [1_550]
            numbers = session.scalars(select(DetectorHistory.number).order_by(DetectorHistory.number)).all()
        assert numbers == [0, 1, 2]
        after = from_parts(stored)
        assert after.requests == 1_550
        assert after.ready_ordinal[0] == before.ready_ordinal[0]
        assert (after.history.wide("expected")[:1_500] == before.history.wide("expected")).all()
    finally:
        database.close()
