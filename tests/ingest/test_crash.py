"""kill -9 in the middle of traffic: what was acknowledged is there, once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from sqlalchemy import select

from driftguard.demo.processes import free_port
from driftguard.records import AcceptanceRecord, encode_record
from driftguard.store.database import Database
from driftguard.store.tables import Record
from tests.store.samples import make_records

BATCH = 20
ACKNOWLEDGED_BEFORE_THE_KILL = 15


@contextmanager
def sidecar(database: Database) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process of its own that takes records."""
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "--factory", "tests.benchmarks.ingest_app:create_app"),
            *("--port", str(port), "--log-level", "warning"),
        ],
        env={**os.environ, "DRIFTGUARD_DATABASE_URL": database.libpq_url},
    )
    try:
        address = f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None, "the sidecar did not start"
            try:
                httpx.get(address)
            except httpx.TransportError:
                time.sleep(0.1)
            else:
                break
        yield process, address
    finally:
        process.kill()
        process.wait()


def post(address: str, batch: list[AcceptanceRecord]) -> dict[str, int]:
    body = b"\n".join(encode_record(record) for record in batch)
    answer = httpx.post(f"{address}/api/v1/records", content=body, timeout=60)
    answer.raise_for_status()
    counts: dict[str, int] = answer.json()
    return counts


def stored(database: Database) -> Counter[UUID]:
    with database.session() as session:
        return Counter(session.scalars(select(Record.record_id)))


def test_every_acknowledged_record_survives_a_kill_exactly_once(database: Database) -> None:
    batches = [make_records(BATCH, seed=seed) for seed in range(400)]
    acknowledged: list[list[AcceptanceRecord]] = []
    enough = threading.Event()

    def send(mine: list[list[AcceptanceRecord]], address: str) -> None:
        for batch in mine:
            try:
                post(address, batch)
            except httpx.HTTPError:
                return  # killed: this batch was not acknowledged
            acknowledged.append(batch)
            if len(acknowledged) >= ACKNOWLEDGED_BEFORE_THE_KILL:
                enough.set()

    with sidecar(database) as (process, address):
        senders = [threading.Thread(target=send, args=(batches[n::4], address)) for n in range(4)]
        for sender in senders:
            sender.start()
        assert enough.wait(120)
        process.kill()
        for sender in senders:
            sender.join()
    assert len(acknowledged) < len(batches), "the kill came after the traffic"
    after_the_kill = stored(database)
    assert {record.record_id for batch in acknowledged for record in batch} <= set(after_the_kill)
    assert set(after_the_kill.values()) == {1}

    # The senders cannot know what was stored: they send everything again to the restarted process.
    with sidecar(database) as (_, address):
        again = [post(address, batch) for batch in batches[:40]]
    assert sum(counts["accepted"] + counts["duplicates"] for counts in again) == 40 * BATCH
    assert sum(counts["duplicates"] for counts in again) == sum(
        record.record_id in after_the_kill for batch in batches[:40] for record in batch
    )
    assert set(stored(database).values()) == {1}
