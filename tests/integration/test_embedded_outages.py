"""The embedded PostgreSQL is killed, and its disk fills up, under a sidecar that is never restarted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from uuid import UUID

import httpx
import psutil
import psycopg
import pytest
from sqlalchemy import select

from driftguard.errors import DatabaseUnavailable
from driftguard.records import encode_record
from driftguard.settings import Settings
from driftguard.store.database import Database
from driftguard.store.open_database import open_database
from driftguard.store.tables import Record
from tests.alerting.http_receiver import wait_until
from tests.pipeline.sidecar import running_sidecar
from tests.store.samples import make_records

pytestmark = pytest.mark.slow

BATCH = 20
KILLS = 2
RECOVERS_FOR_SECONDS = 20.0


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """Short, as the path of a socket has to be, and readable by the user that the server runs as."""
    directory = Path(tempfile.mkdtemp(prefix="driftguard-test-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


class Sender:
    """Sends batches one after the other and remembers what was acknowledged; a refused one comes again."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.acknowledged: set[UUID] = set()
        self.refusals = Counter[int]()

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def waits_for_more(self) -> None:
        before = len(self.acknowledged)
        wait_until(lambda: len(self.acknowledged) > before, "a batch to be acknowledged")

    def _run(self) -> None:
        for seed in count():
            batch = make_records(BATCH, seed=seed)
            body = b"\n".join(map(encode_record, batch))
            while not self._stopping.is_set():
                answer = self._client.post("/api/v1/records", content=body)
                if answer.status_code == 200:
                    self.acknowledged.update(record.record_id for record in batch)
                    break
                self.refusals[answer.status_code] += 1
                self._stopping.wait(0.1)
            else:
                return


def stored(database: Database) -> Counter[UUID]:
    with database.session() as session:
        return Counter(session.scalars(select(Record.record_id)))


def postmaster(data_dir: Path) -> psutil.Process:
    return psutil.Process(int((data_dir / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0]))


def restarts(client: httpx.Client) -> float:
    found = re.search(
        r"^driftguard_embedded_database_restarts_total (\S+)$", client.get("/metrics").text, re.MULTILINE
    )
    assert found
    return float(found[1])


def test_a_postmaster_that_is_killed_is_started_again_and_nothing_is_lost(data_dir: Path) -> None:
    with open_database(Settings(data_dir=data_dir)) as database:
        with running_sidecar(database, data_dir) as client:
            with Sender(client) as sender:
                for kill in range(1, KILLS + 1):
                    sender.waits_for_more()
                    postmaster(data_dir).kill()
                    wait_until(lambda: restarts(client) == kill, "the restart")  # noqa: B023
                    sender.waits_for_more()
            wait_until(lambda: client.get("/readyz").status_code == 200, "the sidecar to be ready")
        assert set(sender.refusals) <= {503}
        found = stored(database)
        assert sender.acknowledged <= set(found)
        assert set(found.values()) == {1}
    with pytest.raises((OSError, psutil.NoSuchProcess)):
        postmaster(data_dir)


def test_a_disk_that_was_full_needs_nothing_but_room(data_dir: Path) -> None:
    with small_disk(data_dir, megabytes=160), open_database(Settings(data_dir=data_dir)) as database:
        with running_sidecar(database, data_dir) as client:
            with Sender(client) as sender:
                sender.waits_for_more()
                fill(data_dir)
                wait_until(lambda: sender.refusals[503] >= 2, "the disk to be full")
                since = time.monotonic()
                wait_until(lambda: has_given_up(database, data_dir, since), "the server to give up")
                assert client.get("/readyz").status_code == 503
                (data_dir / "filler").unlink()
                wait_until(lambda: restarts(client) == 1, "the restart")
                sender.waits_for_more()
            wait_until(lambda: client.get("/readyz").status_code == 200, "the sidecar to be ready")
        assert set(sender.refusals) == {503}
        found = stored(database)
        assert sender.acknowledged <= set(found)
        assert set(found.values()) == {1}


def has_postmaster(data_dir: Path) -> bool:
    try:
        return postmaster(data_dir).is_running()
    except (OSError, ValueError, psutil.Error):
        return False


def has_given_up(database: Database, data_dir: Path, since: float) -> bool:
    """Fills the log that the server must write before anything else, for which there is no room either. A
    server that has tried to recover for too long since that time (monotonic), again and again, is killed."""
    with (
        suppress(psycopg.OperationalError),
        psycopg.connect(database.libpq_url, autocommit=True) as connection,
    ):
        while True:
            connection.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 1000000))")
    if time.monotonic() - since > RECOVERS_FOR_SECONDS:
        with suppress(OSError, ValueError, psutil.Error):
            postmaster(data_dir).kill()
    return not has_postmaster(data_dir)


def fill(directory: Path) -> None:
    """Leaves nothing but what the server holds already."""
    # Unbuffered: what a full disk did not take would be written, and refused, once more on closing.
    with (directory / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))


@contextmanager
def small_disk(directory: Path, *, megabytes: int) -> Iterator[None]:
    """Skips the test where nothing can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)]
    if (mounted := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    directory.chmod(0o755)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=False)


def test_a_server_that_does_not_start_says_why(data_dir: Path) -> None:
    with open_database(Settings(data_dir=data_dir)):
        pass
    (data_dir / "postgres" / "postgresql.conf").write_text("no_such_setting = 1\n")
    with (
        pytest.raises(DatabaseUnavailable, match=r"does not start .*FATAL:.*postgresql\.conf.*its log is"),
        open_database(Settings(data_dir=data_dir)),
    ):
        pass
