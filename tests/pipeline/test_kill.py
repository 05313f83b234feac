"""kill -9 at any moment of the fold: what is stored in the end is what an uninterrupted fold stores."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, text

from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import PROCESS_ID, Pipeline
from driftguard.store.database import Database
from driftguard.store.folding import hand_over, position, unfolded
from driftguard.store.tables import (
    DetectorHistory,
    DetectorState,
    Incident,
    IncidentTransition,
    Notification,
)
from tests.alerting.http_receiver import wait_until
from tests.pipeline.traffic import Traffic, store

pytestmark = pytest.mark.slow

GOOD = {"code": 0.75, "german": 0.7}
BAD = {"code": 0.75, "german": 0.35}
KILLS = 4
RECORDS = 4_100


@pytest.fixture
def folding(database_url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.pipeline.folding_process", database_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def start(folding: subprocess.Popen[str], batch: int) -> int:
    """The id of a process that folds."""
    assert folding.stdin is not None
    assert folding.stdout is not None
    folding.stdin.write(f"{batch}\n")
    folding.stdin.flush()
    return int(folding.stdout.readline())


def exit_code(folding: subprocess.Popen[str]) -> int:
    """Of the process started last, once it has ended."""
    assert folding.stdout is not None
    return int(folding.stdout.readline())


def folded(database: Database) -> int:
    with database.session() as session:
        return RECORDS - unfolded(session)


def outcome(database: Database) -> dict[str, Any]:
    """Everything the fold derived, but for wall-clock times and generated row numbers."""
    with database.session() as session:
        return {
            "position": position(session),
            "states": session.execute(
                select(DetectorState.stream_id, DetectorState.state).order_by(DetectorState.stream_id)
            ).all(),
            "histories": session.execute(
                select(DetectorHistory.stream_id, DetectorHistory.number, DetectorHistory.piece).order_by(
                    DetectorHistory.stream_id, DetectorHistory.number
                )
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


def frozen_in_a_fold(database: Database, process: int) -> None:
    """Stops the process at a moment at which it holds the lock."""
    for _ in range(1_000):
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.05)  # a commit that is on its way arrives
        with database.session() as session:
            if session.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted")):
                return
        os.kill(process, signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError("it never folds")


@pytest.mark.parametrize("then", [signal.SIGKILL, signal.SIGCONT])
def test_whoever_takes_over_from_a_frozen_process_waits_for_the_end_of_its_fold(
    database: Database, folding: subprocess.Popen[str], then: signal.Signals
) -> None:
    traffic = Traffic(seed=12)
    store(database, traffic.draw(RECORDS, GOOD))
    taking = Pipeline(
        database, DetectorConfig(minimum_drop=0.1), Metrics(), batch_records=50, take_over_seconds=0.0
    )
    with ThreadPoolExecutor(1) as threads:
        for turn in range(1, 4):  # so that the one that takes over has states of before
            with database.session() as session:
                hand_over(session, PROCESS_ID)
            process = start(folding, batch=20)
            wait_until(lambda: folded(database) >= turn * 700, "the fold to get so far", timeout_seconds=60)  # noqa: B023
            frozen_in_a_fold(database, process)
            before = folded(database)
            taken_over = threads.submit(taking.fold_batch)
            wait_until(lambda: is_awaited(database), "it to wait for the lock")
            assert folded(database) == before
            os.kill(process, then)
            if then == signal.SIGCONT:
                assert taken_over.result() == 0  # it was alive
                os.kill(process, signal.SIGKILL)
            else:
                assert taken_over.result() == 50
            assert exit_code(folding) == -signal.SIGKILL
            while taking.fold_batch() == 0:  # until what the killed one had begun is rolled back
                pass
    while taking.fold_batch():
        pass
    interrupted = outcome(database)

    with database.session() as session:
        for table in ("incidents", "detector_states", "fold_positions"):
            session.execute(text(f"DELETE FROM {table}"))
    start(folding, batch=5000)
    assert exit_code(folding) == 0
    assert outcome(database) == interrupted
    assert len(interrupted["histories"]) > 2


def is_awaited(database: Database) -> bool:
    """The lock of the fold."""
    with database.session() as session:
        query = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
        return bool(session.scalar(text(query)))


def test_killed_at_any_moment_the_fold_ends_where_an_uninterrupted_one_does(
    database: Database, folding: subprocess.Popen[str]
) -> None:
    traffic = Traffic(seed=11)
    for server in ("chat", "mail"):
        store(database, traffic.draw(900, GOOD, server=server) + traffic.draw(250, BAD, server=server))
        store(database, traffic.draw(900, GOOD, server=server))
    moments = random.Random(11)
    for kill in range(1, KILLS + 1):
        process = start(folding, batch=20)
        wanted = kill * RECORDS // (2 * KILLS)  # so that the last kill, however late, falls inside the fold
        wait_until(lambda: folded(database) >= wanted, "the fold to get so far", timeout_seconds=60)  # noqa: B023
        time.sleep(moments.uniform(0.0, 0.02))  # anywhere in a batch
        os.kill(process, signal.SIGKILL)
        assert exit_code(folding) == -signal.SIGKILL
        assert folded(database) < RECORDS
    start(folding, batch=20)
    assert exit_code(folding) == 0
    interrupted = outcome(database)

    with database.session() as session:
        for table in ("incidents", "detector_states", "fold_positions"):
            session.execute(text(f"DELETE FROM {table}"))
    start(folding, batch=5000)
    assert exit_code(folding) == 0

    assert outcome(database) == interrupted
    assert len(interrupted["incidents"]) == 2
    assert len(interrupted["histories"]) > 2
