"""Of several things that are wrong with a stream, the verdict tells one, and its sentence where."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import update

from driftguard.status.gather import gather
from driftguard.status.verdict import standings
from driftguard.store import folding
from driftguard.store.database import Database
from driftguard.store.tables import Incident
from tests.alerting.incident_rows import add_incident, add_stream


def verdict(database: Database) -> str:
    with database.session() as session:
        (found,) = standings(session, datetime.now(UTC))
        return found.verdict


def test_slower_tokens_do_not_hide_that_the_detector_fails(database: Database) -> None:
    stream_id = add_stream(database)
    add_incident(database, [], stream_id=stream_id)
    now = datetime.now(UTC)
    with database.session() as session:
        session.execute(update(Incident).values(direction="slower"))
    assert verdict(database) == "degraded"
    set_aside = {
        "after_seq": 0,
        "records_behind": 10,
        "failures": 5,
        "reason": "it fails",
        "version": "0.1.0",
        "since": now - timedelta(hours=1),
        "next_try_at": None,
        "set_aside_at": now,
    }
    with database.session() as session:
        folding.hold_stream(session, stream_id, set_aside)
    assert verdict(database) == "cannot_be_judged"


def test_segments_that_are_back_while_others_are_not_are_told(database: Database) -> None:
    incident_id = add_incident(database, [])
    now = datetime.now(UTC)
    with database.session() as session:
        incident = session.get_one(Incident, incident_id)
        (fallen,) = incident.segments
        incident.segments = (replace(fallen, segment="code", back_at=now), replace(fallen, segment="german"))
    with database.session() as session:
        (found,) = gather(session, now)
    assert "acceptance in code, german fell" in found.text
    assert "It is over in code by now." in found.text
