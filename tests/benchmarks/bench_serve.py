"""What one `driftguard serve` takes, its detector on: `python -m tests.benchmarks.bench_serve [--records N]`.

Records of 8 streams with 8 segments each are sent over HTTP in batches of 500 as fast as they are
acknowledged: first without sessions, then of 1,000 named sessions that take turns in each stream. Records per
second to their acknowledgement, and to the end of the fold, after which the detector has seen them all; and
the sidecar's processor time per record. Client, sidecar and PostgreSQL share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from driftguard.demo.processes import free_url, start_sidecar
from driftguard.records import encode_record
from tests.benchmarks.bench_ingest import BATCH, send
from tests.store.samples import make_records

STREAMS, SEGMENTS = 8, 8
WARM_UP = 40_000  # records: most reference periods have ended then
READY_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    records = parser.parse_args().records
    print(f"{platform.machine()}, {os.cpu_count()} cores shared by client, sidecar and PostgreSQL (fsync on)")
    _measure("without sessions", records, session=None)
    _measure("with sessions", records)


def _measure(traffic: str, records: int, **fixed: object) -> None:
    with tempfile.TemporaryDirectory(prefix="driftguard-bench-") as name:
        url = free_url()
        process = start_sidecar(Path(name), url, f'data_dir = "{name}/data"\n')
        try:
            process.wait_ready(f"{url}/readyz", READY_SECONDS)
            _fold(url, _bodies(WARM_UP, seed=1, **fixed))
            bodies = _bodies(records, seed=2, **fixed)
            spent, begun = _processor_seconds(process.popen.pid), time.perf_counter()
            acknowledged = _fold(url, bodies)
            took = time.perf_counter() - begun
            spent = _processor_seconds(process.popen.pid) - spent
        finally:
            process.stop()
    print(
        f"{traffic}: {records:,} records of {STREAMS} streams, {acknowledged:,.0f}/s acknowledged, "
        f"{records / took:,.0f}/s to the end of the fold; {1e6 * spent / records:.0f} us of the sidecar's "
        "processor time each"
    )


def _bodies(records: int, *, seed: int, **fixed: object) -> list[bytes]:
    """Batches in which streams take turns, as requests of several servers come."""
    each = records // STREAMS
    streams = [
        make_records(each, seed=100 * seed + stream, segments=SEGMENTS, server=f"server-{stream}", **fixed)
        for stream in range(STREAMS)
    ]
    made = [encode_record(record) for turn in zip(*streams, strict=True) for record in turn]
    return [b"\n".join(made[start : start + BATCH]) for start in range(0, len(made), BATCH)]


def _fold(url: str, bodies: list[bytes]) -> float:
    """Sends them and waits until all are folded. Returns records acknowledged per second."""
    load = asyncio.run(send(url, bodies, rate=None))
    while httpx.get(f"{url}/readyz").json()["fold_lag_records"]:
        time.sleep(0.02)
    return load.records_per_second


def _processor_seconds(process_id: int) -> float:
    times = psutil.Process(process_id).cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
