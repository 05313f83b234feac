"""kill -9 at any moment of the fold: what is stored in the end is what an uninterrupted fold stores."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import Any

from sqlalchemy import select, text

from driftguard.store import detector_states
from driftguard.store.database import Database
from driftguard.store.tables import DetectorState, Incident, IncidentTransition, Notification
from tests.pipeline.traffic import Traffic, store

GOOD = {"code": 0.75, "german": 0.7}
BAD = {"code": 0.75, "german": 0.35}
KILLS = 5


def start(url: str, batch: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.pipeline.folding_process", url, str(batch)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "folding\n"
    return process


def outcome(database: Database) -> dict[str, Any]:
    """Everything the fold derived, but for wall-clock times and generated row numbers."""
    with database.session() as session:
        return {
            "position": detector_states.position(session),
            "states": session.execute(
                select(DetectorState.stream_id, DetectorState.state).order_by(DetectorState.stream_id)
            ).all(),
            "incidents": session.execute(
                select(
                    Incident.id,
                    Incident.state,
                    Incident.change_point_seq,
                    Incident.interval_start_at,
                    Incident.acceptance_after,
                    Incident.tokens_per_second_after,
                ).order_by(Incident.opened_seq)
            ).all(),
            "transitions": session.execute(
                select(IncidentTransition.incident_id, IncidentTransition.to_state).order_by(
                    IncidentTransition.id
                )
            ).all(),
            "notifications": session.execute(
                select(Notification.incident_id, Notification.event).order_by(Notification.id)
            ).all(),
        }


def test_killed_at_any_moment_the_fold_ends_where_an_uninterrupted_one_does(
    database: Database, database_url: str
) -> None:
    traffic = Traffic(seed=11)
    for server in ("chat", "mail"):
        store(database, traffic.draw(900, GOOD, server=server) + traffic.draw(250, BAD, server=server))
        store(database, traffic.draw(900, GOOD, server=server))
    random_moment = random.Random(11)
    stopped_at = []
    for _ in range(KILLS):
        process = start(database_url, batch=20)
        time.sleep(random_moment.uniform(0.05, 0.35))
        process.kill()
        process.wait()
        with database.session() as session:
            stopped_at.append(detector_states.position(session))
    finishing = start(database_url, batch=20)
    assert finishing.wait(timeout=120) == 0
    interrupted = outcome(database)

    with database.session() as session:
        for table in ("incidents", "detector_states", "fold_positions"):
            session.execute(text(f"DELETE FROM {table}"))
    assert start(database_url, batch=5000).wait(timeout=120) == 0

    assert outcome(database) == interrupted
    assert len(interrupted["incidents"]) == 2
    newest = interrupted["position"]
    assert any(0 < position < newest for position in stopped_at), "no kill fell inside the fold"
