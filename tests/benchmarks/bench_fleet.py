"""What a fleet costs to look at: `python -m tests.benchmarks.bench_fleet [STREAMS]` (10,000 by default).

Streams of two segments, every second of them silent (tests/many_streams.py). Printed: seconds of the page,
the API and a look, the first of which asks for every usual silence; size and seconds of /metrics; the share
of one core that the sidecar takes while nothing arrives, PostgreSQL apart. On a machine that others use, the
seconds of this process are those to compare.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from fastapi.testclient import TestClient

from driftguard.app import Sidecar, create_app
from driftguard.pipeline.look_around import LookAround
from driftguard.settings import Settings
from driftguard.store.database import Database, upgrade
from driftguard.store.embedded import start_embedded
from tests.many_streams import populate

STREAMS = 10_000
IDLE_SECONDS = 40.0
PATHS = ("/", "/api/v1/status", "/api/v1/streams?limit=100", "/streams/2", "/metrics")


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as directory, start_embedded(Path(directory) / "data") as url:
        upgrade(url)
        database = Database.open(url)
        _print("making the scene", lambda: populate(database, count, minutes_apart=5))
        settings = Settings(data_dir=Path(directory))
        sidecar = Sidecar(settings, database, "http://sidecar")
        look = LookAround(database, sidecar.metrics, (), sidecar.fold_watch, sidecar.usual_silences)
        for which in ("first", "second"):
            _print(f"{which} look", lambda: look.look(datetime.now(UTC)))
        client = TestClient(create_app(sidecar), "http://127.0.0.1")
        for path in (*PATHS, *PATHS[:1]):  # the first page compiles its template
            _print(f"GET {path}", lambda path=path: client.get(path).content)  # type: ignore[misc]
        with client:  # starts its threads
            time.sleep(10.0)
            before, at = time.process_time(), time.monotonic()
            time.sleep(IDLE_SECONDS)
            share = (time.process_time() - before) / (time.monotonic() - at)
        print(f"idle: {share:.1%} of a core", flush=True)
        database.close()


def _print(name: str, work: Callable[[], bytes | None]) -> None:
    begun, worked = time.monotonic(), time.process_time()
    done = work()
    took, worked = time.monotonic() - begun, time.process_time() - worked
    size = f", {len(done) / 1e6:.2f} MB" if done else ""
    print(f"{name}: {took:.2f} s, {worked:.2f} of them in this process{size}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TZ", "UTC")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else STREAMS)
