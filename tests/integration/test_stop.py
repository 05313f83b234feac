"""SIGTERM ends the process whatever its database does: the real command, behind a proxy."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from driftguard.demo.processes import free_port
from driftguard.records import AcceptanceRecord, encode_record
from driftguard.store.database import Database
from tests.alerting.http_receiver import wait_until
from tests.store.black_hole import BlackHole, black_hole
from tests.store.samples import make_records

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 120.0  # of the test, with a machine that is busy


@pytest.fixture
def hole(database_url: str) -> Iterator[BlackHole]:
    with black_hole(database_url) as hole:
        yield hole


@contextmanager
def serving(hole: BlackHole, directory: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    port = free_port()
    command = [sys.executable, "-m", "driftguard", "serve", "--port", str(port), "--data-dir", str(directory)]
    environment = {**os.environ, "DRIFTGUARD_DATABASE_URL": hole.url}
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS) as client:
            wait_until(lambda: answers(client), "the sidecar to start")
            yield process, client
    finally:
        process.kill()
        process.wait()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


def post(client: httpx.Client, records: list[AcceptanceRecord]) -> httpx.Response:
    return client.post("/api/v1/records", content=b"\n".join(map(encode_record, records)))


def test_a_silent_database_does_not_keep_the_process_from_ending(
    hole: BlackHole, database: Database, tmp_path: Path
) -> None:
    with serving(hole, tmp_path) as (process, client), ThreadPoolExecutor(1) as sender:
        assert post(client, make_records(10)).status_code == 200
        hole.hold()
        unacknowledged = sender.submit(post, client, make_records(10, seed=1))
        metric = "driftguard_ingest_queued_records 10.0"
        wait_until(lambda: metric in httpx.get(f"{client.base_url}/metrics").text, "the batch to wait")
        process.send_signal(signal.SIGTERM)
        refused = unacknowledged.result(PATIENCE_SECONDS)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert process.wait(PATIENCE_SECONDS) == 1
    log = (tmp_path / "log").read_text()
    assert re.search(r"sidecar_did_not_stop_in_time.*(detector|look around|ingest-writer|chores)", log)
    with database.session() as session:
        assert session.connection().exec_driver_sql("SELECT count(*) FROM records").scalar() == 10


@pytest.mark.parametrize("database_is", ["there", "gone"])
def test_with_a_database_that_is_there_or_gone_it_ends_in_order(
    hole: BlackHole, tmp_path: Path, database_is: str
) -> None:
    with serving(hole, tmp_path) as (process, client):
        assert post(client, make_records(10)).status_code == 200
        if database_is == "gone":
            hole.refuse()
            wait_until(lambda: not answers(client), "the sidecar to miss its database")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert "in_time" not in (tmp_path / "log").read_text()
