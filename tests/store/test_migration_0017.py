"""Migration 0017: why a stream learns its baselines again becomes a code."""

from __future__ import annotations

import pytest
from alembic import command
from sqlalchemy import text

from driftguard.store import streams
from driftguard.store.database import Database
from driftguard.store.migrations import alembic_config

_STREAM = """
    INSERT INTO streams (server, target, draft, draft_version, method, first_seen_at, last_seen_at,
        begun_anew_at, begun_anew_because)
    VALUES ('chat', 'target', 'draft', '1', 'draft_model', now(), now(), now(), :because)
    """


@pytest.mark.parametrize(
    ("sentence", "code"),
    [
        ("stored by another version of DriftGuard; baselines are relearned", "other_version"),
        ("the stored detector state is damaged; baselines are relearned", "damaged"),
        (None, None),
    ],
)
def test_a_stored_sentence_becomes_its_code(
    empty_database_url: str, sentence: str | None, code: str | None
) -> None:
    database = Database.open(empty_database_url)
    try:
        with database.engine.connect() as connection:
            command.upgrade(alembic_config(connection), "0016")
            connection.execute(text(_STREAM), {"because": sentence})
            connection.commit()
        database.upgrade()
        with database.session() as session:
            (stream,) = streams.all_streams(session)
    finally:
        database.close()
    assert stream.begun_anew_because == code
