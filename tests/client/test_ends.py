"""A process with a client ends or forks, as services with workers do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from driftguard.settings import Settings
from driftguard.store.database import Database
from tests.api.ingest_server import serving
from tests.benchmarks.ingest_app import ingest_app
from tests.client.test_client import stored, unrecorded
from tests.conftest import PATIENCE_SECONDS

BEGIN = """
import os, signal, sys, threading
from driftguard.client import Client
from tests.store.samples import make_records

client = Client(sys.argv[1], linger_seconds=60)
def send(number):
    for record in make_records(number, seed=number):
        print(record.record_id, flush=True)
        client.send(record)
"""
ENDS = {
    "exit": "send(3); sys.exit()",
    "end": "send(3)",
    "error": "send(3); raise RuntimeError",
    "handled signal": """
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
send(3)
os.kill(os.getpid(), signal.SIGTERM)
""",
}
WITHOUT_THREADS = """
def refuse(*_):
    raise RuntimeError("can't start new thread")
start, threading.Thread.start = threading.Thread.start, refuse
send(3)
client.count_unrecorded("chat", "no_numbers")
if sys.argv[2] == "later":
    threading.Thread.start = start
    if not client.flush(60):
        sys.exit("a flush starts no thread")
    send(2)
    client.flush(60)
    client.count_unrecorded("chat", "no_numbers")
client.close(60)
counts = client.counts
sys.exit(counts.dropped or counts.waiting)
"""
AWAY = """
def refuse(*_):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
send(3)
client.count_unrecorded("chat", "no_numbers")
client.close(1)
client.close(1)
"""
FORKS = """
send(2)
held, ended = threading.Event(), threading.Event()
def hold():  # the child's copy of the lock would be held for ever
    with client._changed:
        held.set()
        ended.wait()
if sys.argv[2] == "locked":
    threading.Thread(target=hold).start()
    held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    send(3)
    client.close()
    counts = client.counts
    os._exit(counts.sent != 3 or counts.dropped != 0)
status = os.waitpid(child, 0)[1]
ended.set()
send(1)
sys.exit(status)
"""


@pytest.fixture
def url(database: Database) -> Iterator[httpx.URL]:
    with serving(ingest_app(Settings(), database.libpq_url)) as client:
        yield client.base_url


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("end", ENDS)
def test_what_waits_is_sent_where_a_process_ends_in_order(
    end: str, url: httpx.URL, database: Database
) -> None:
    given = set(run(ENDS[end], str(url)).stdout.split())
    assert len(given) == 3
    assert stored(database) == given


@pytest.mark.parametrize("thread", ["never", "later"])
def test_where_no_thread_can_be_started_nobody_hears_an_error_and_nothing_is_lost(
    thread: str, url: httpx.URL, database: Database
) -> None:
    """As at a limit of the container, or where a process of Python 3.12 is ending."""
    ended = run(WITHOUT_THREADS, str(url), thread)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("no thread could be started") == 2  # told once of each
    given = set(ended.stdout.split())
    assert len(given) == (3 if thread == "never" else 5)
    assert stored(database) == given
    assert unrecorded(database) == {("chat", "no_numbers"): 1 if thread == "never" else 2}


def test_a_client_without_a_thread_or_a_sidecar_may_be_closed_twice() -> None:
    ended = run(AWAY, "http://127.0.0.1:9")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("lock", ["free", "locked"])
def test_parent_and_child_of_a_fork_send_their_own_records(
    lock: str, url: httpx.URL, database: Database
) -> None:
    ended = run(FORKS, str(url), lock)
    assert ended.returncode == 0, ended.stderr
    given = set(ended.stdout.split())
    assert len(given) == 6
    assert stored(database) == given
