"""What recurs in the sidecar can fail and goes on; an alert has to see that it does not succeed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import procrastinate
import psycopg
import pytest
from structlog.testing import capture_logs

from driftguard import app
from driftguard.app import Sidecar
from driftguard.errors import DatabaseUnavailable
from driftguard.settings import Settings
from driftguard.store.database import Database


def fail() -> None:
    raise RuntimeError("no such file")


def wait_for_the_database() -> None:
    raise DatabaseUnavailable("connection refused")


def test_a_failure_is_counted_and_leaves_the_time_of_the_last_success(
    database: Database, tmp_path: Path
) -> None:
    sidecar = Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")
    value, labels = sidecar.metrics.registry.get_sample_value, {"chore": "diagnose"}
    last_success = "driftguard_chore_last_success_timestamp_seconds"
    assert value("driftguard_chore_failures_total", labels) == 0
    sidecar._attempt("diagnose", fail)
    assert value("driftguard_chore_failures_total", labels) == 1
    assert value(last_success, labels) is None
    sidecar._attempt("diagnose", wait_for_the_database)
    assert value("driftguard_chore_failures_total", labels) == 1
    before = datetime.now(UTC).timestamp()
    sidecar._attempt("diagnose", lambda: None)
    succeeded = value(last_success, labels)
    assert succeeded is not None
    assert succeeded >= before


def test_workers_that_wait_for_the_database_say_so_in_one_line(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")

    async def cut_off(sidecar: Sidecar, name: str, _: list[str]) -> None:
        if name == "settling":  # the second of them
            sidecar._stopping.set()
        raise procrastinate.exceptions.ConnectorException from psycopg.OperationalError("nobody answers")

    monkeypatch.setattr(Sidecar, "_run_worker", cut_off)
    monkeypatch.setattr("driftguard.app.WORKER_PAUSE_SECONDS", 0.0)
    with capture_logs() as logs:
        asyncio.run(sidecar.work())
    assert [line["worker"] for line in logs] == ["retraining", "settling"]
    for line in logs:
        assert (line["event"], line["error"]) == ("the job workers wait for the database", "nobody answers")
        assert "exc_info" not in line
    failures = sidecar.metrics.registry.get_sample_value("driftguard_loop_failures_total", {"loop": "jobs"})
    assert failures == 0


def test_a_worker_that_overhears_its_cancellation_ends_all_the_same(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As within `asyncio.wait_for` of Python 3.11 when its time is over at the same moment."""
    sidecar = Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")
    begun, all_begun = set[str](), asyncio.Event()

    async def overhearing(_: Sidecar, name: str, __: list[str]) -> None:
        begun.add(name)
        if len(begun) == 2:
            all_begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3_600.0)
        await asyncio.sleep(3_600.0)

    async def stopped() -> None:
        jobs = asyncio.create_task(sidecar.work())
        await all_begun.wait()
        sidecar.stop_soon()
        jobs.cancel()
        await asyncio.gather(jobs, return_exceptions=True)

    monkeypatch.setattr(Sidecar, "_run_worker", overhearing)
    monkeypatch.setattr(app, "LAST_JOBS_SECONDS", 0.1)
    asyncio.run(stopped())


def test_partitions_are_maintained_soon_after_the_machine_was_suspended(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has slept for three hours, the alert on this chore would fire for up to an hour."""
    sidecar = Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")
    since_boot = iter([100.0, 102.0, 8 * 3_600.0, 8 * 3_600.0 + 2.0])
    stops = iter([False] * 4 + [True])
    maintained = []
    monkeypatch.setattr(app, "_seconds_since_boot", lambda: next(since_boot))
    monkeypatch.setattr(sidecar._stopping, "wait", lambda _: next(stops))
    monkeypatch.setattr(sidecar, "_maintain", lambda: maintained.append(True))
    sidecar._do_chores()
    assert len(maintained) == 2


def test_partitions_are_maintained_soon_after_the_database_is_back(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once that was away for three hours, the alert on this chore would fire for up to an hour."""
    sidecar = Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")
    since_boot = [100.0, 102.0, 230.0, 360.0, 362.0, 3_900.0, 3_961.0]
    now = iter(since_boot)
    stops = iter([False] * len(since_boot) + [True])
    tried = []

    def maintain() -> None:
        tried.append(at[-1])
        if at[-1] < 300.0:
            wait_for_the_database()

    at: list[float] = []

    def seconds_since_boot() -> float:
        at.append(next(now))
        return at[-1]

    monkeypatch.setattr(app, "_seconds_since_boot", seconds_since_boot)
    monkeypatch.setattr(sidecar._stopping, "wait", lambda _: next(stops))
    monkeypatch.setattr(sidecar, "_maintain", maintain)
    sidecar._do_chores()
    assert tried == [100.0, 230.0, 360.0, 3_961.0]
