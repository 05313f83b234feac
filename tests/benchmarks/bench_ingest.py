"""Durable ingest over HTTP: peak records/s, and the acknowledgement time at a paced rate.

`python -m tests.benchmarks.bench_ingest [--records N] [--rate N]`. A batch counts when its answer came, and
answers come after the commit. Client, sidecar and database share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from driftguard.demo.processes import free_port
from driftguard.records import encode_record
from driftguard.store.database import upgrade
from driftguard.store.embedded import start_embedded
from tests.store.samples import make_records

BATCH = 500
CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds from when each batch was due to its acknowledgement, and the whole run's length."""

    acknowledgement_seconds: list[float]
    elapsed_seconds: float

    @property
    def records_per_second(self) -> float:
        return len(self.acknowledgement_seconds) * BATCH / self.elapsed_seconds

    def quantile(self, percent: int) -> float:
        return statistics.quantiles(self.acknowledgement_seconds, n=100)[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000, help="records of each of the two runs")
    parser.add_argument("--rate", type=int, default=10_000, help="records/s of the paced run")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores shared by client, sidecar and PostgreSQL 18 (fsync on)"
    )
    directory = Path(tempfile.mkdtemp(prefix="driftguard-bench-"))
    try:
        with start_embedded(directory) as url, _sidecar(url) as base_url:
            _measure(base_url, options.records, options.rate)
    finally:
        shutil.rmtree(directory)


def _measure(base_url: str, records: int, rate: int) -> None:
    asyncio.run(send(base_url, _bodies(20_000, seed=1), rate=None))  # warm-up
    peak = asyncio.run(send(base_url, _bodies(records, seed=2), rate=None))
    print(f"peak: {peak.records_per_second:,.0f} durable records/s in batches of {BATCH}")
    paced = asyncio.run(send(base_url, _bodies(records, seed=3), rate=rate))
    print(
        f"paced at {rate:,}/s (reached {paced.records_per_second:,.0f}/s): acknowledgement "
        f"p50 {paced.quantile(50) * 1e3:.1f} ms, p99 {paced.quantile(99) * 1e3:.1f} ms"
    )


def _bodies(records: int, *, seed: int) -> list[bytes]:
    made = make_records(records, seed=seed, segments=8)
    return [
        b"\n".join(encode_record(record) for record in made[start : start + BATCH])
        for start in range(0, records, BATCH)
    ]


async def send(base_url: str, bodies: list[bytes], *, rate: int | None) -> Load:
    """As fast as CONNECTIONS allow, or one batch every BATCH / rate seconds whatever the answers do."""
    times: list[float] = []
    started = time.perf_counter()
    limits = httpx.Limits(max_connections=CONNECTIONS if rate is None else None)
    async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=limits) as client:
        if rate is None:
            waiting = iter(bodies)
            await asyncio.gather(*(_drain(client, waiting, times) for _ in range(CONNECTIONS)))
        else:
            async with asyncio.TaskGroup() as tasks:
                for number, body in enumerate(bodies):
                    due = started + number * BATCH / rate
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    tasks.create_task(_post(client, body, times, due))
    return Load(times, time.perf_counter() - started)


async def _drain(client: httpx.AsyncClient, waiting: Iterator[bytes], times: list[float]) -> None:
    for body in waiting:
        await _post(client, body, times, time.perf_counter())


async def _post(client: httpx.AsyncClient, body: bytes, times: list[float], due: float) -> None:
    """Counts from when the batch was due, so that a slow sender hides no delay."""
    answer = await client.post("/api/v1/records", content=body)
    if answer.status_code != httpx.codes.OK or answer.json()["accepted"] != BATCH:
        raise SystemExit(f"not stored: {answer.status_code} {answer.text[:500]}")
    times.append(time.perf_counter() - due)


@contextmanager
def _sidecar(url: str) -> Iterator[str]:
    upgrade(url)
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "--factory", "tests.benchmarks.ingest_app:create_app"),
            *("--port", str(port), "--log-level", "warning"),
        ],
        env={**os.environ, "DRIFTGUARD_DATABASE_URL": url},
    )
    try:
        base_url = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(base_url, process)
        yield base_url
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_it_answers(base_url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        try:
            httpx.get(base_url)
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the sidecar did not start")


if __name__ == "__main__":
    main()
