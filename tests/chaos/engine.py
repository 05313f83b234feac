"""The built-in engine, killed while it answers: each record that it spooled reaches the sidecar once."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx

from driftguard.demo.processes import SERVER, Process, free_url, start_engine
from driftguard.store.folding import StoredRecord, read_after
from driftguard.store.streams import all_streams
from tests.chaos.row import Row
from tests.chaos.scene import SERVERS, closing, scene
from tests.chaos.sidecar import wait_for

UNSPOOLED_SECONDS: Final = 1.0  # the newest half second is in memory, see the engine's telemetry
START_SECONDS: Final = 120.0
CLIENTS: Final = 3


def engine_is_killed(seed: int, rounds: int) -> Row:
    row = Row("the engine is killed", f"{rounds} x SIGKILL while it answers")
    with scene(seed) as here:
        clients = _Clients(free_url())
        here.send()
        kills = []
        for _ in range(rounds + 1):
            engine = start_engine(here.directory, clients.url, here.sidecar.url)
            try:
                engine.wait_ready(f"{clients.url}/health", START_SECONDS)
                time.sleep(here.random.uniform(3.0, 6.0))
            finally:
                kills.append(time.time())
                _kill(engine)
        engine = start_engine(here.directory, clients.url, here.sidecar.url)  # sends what is in the spool
        clients.stop()
        wait_for(lambda: not _spooled(here.directory), 60.0, "the spool to be empty")
        engine.stop()
        row = closing(here, row, SERVERS, 60.0)
        assert here.database is not None
        with here.database.session() as session:
            engines = {stream.id for stream in all_streams(session) if stream.server == SERVER}
            stored = [item for item in read_after(session, 0, limit=100_000) if item.stream_id in engines]
        _judge(row, clients, stored, kills)
        return row


def _kill(engine: Process) -> None:
    engine.popen.kill()
    engine.popen.wait()


def _spooled(directory: Path) -> list[Path]:
    return [path for path in (directory / "spool").rglob("*.jsonl") if path.stat().st_size]


def _judge(row: Row, clients: _Clients, stored: list[StoredRecord], kills: list[float]) -> None:
    """Wrong: more records than requests, or fewer than requests that were answered well before a kill."""
    firm = sum(all(not kill - UNSPOOLED_SECONDS < at <= kill for kill in kills) for at in clients.answered)
    if not firm <= len(stored) <= clients.asked:
        row.wrong.append(
            f"{len(stored)} records of {clients.asked} requests; {firm} were answered well before a kill"
        )


class _Clients:
    """Threads that ask for short answers, through kills."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked = 0
        self.answered: list[float] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        body = {"model": "any", "prompt": "def add(a, b):", "max_tokens": 12}
        while not self._stopping.wait(0.05):
            with self._lock:
                self.asked += 1
            with suppress(httpx.HTTPError):
                answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=30.0)
                if answer.status_code == 200:
                    with self._lock:
                        self.answered.append(time.time())
